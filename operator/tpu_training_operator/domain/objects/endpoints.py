"""Publishes the addresses behind the names of a gang's workers, in the forms that DNS servers read.

The headless Service has no selector: with one, the controller manager would write the same lists again for every worker
that starts or stops. The operator writes them once, when every worker of the attempt has its address.

CoreDNS and Cloud DNS read EndpointSlices. kube-dns, the default of GKE Standard clusters, reads only Endpoints.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from tpu_training_operator.api import constants
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.domain.cluster_state.observed import WorkerPod
from tpu_training_operator.domain.job import naming
from tpu_training_operator.domain.job.topology import SliceLayout
from tpu_training_operator.domain.objects.actions import Publish
from tpu_training_operator.domain.objects.shared import Object, metadata

# The API server's limit for an EndpointSlice.
_MOST_ENDPOINTS = 1000
_MANAGED_BY = "endpointslice.kubernetes.io/managed-by"
_SERVICE_NAME = "kubernetes.io/service-name"
# kube-proxy ignores EndpointSlices with this label.
_HEADLESS = "service.kubernetes.io/headless"
# Without this label, the controller manager would copy the Endpoints into further EndpointSlices.
_NOT_COPIED = "endpointslice.kubernetes.io/skip-mirror"

Address = IPv4Address | IPv6Address
_Member = tuple[WorkerPod, Address]


def endpoint_slice_names(job: str, layout: SliceLayout) -> list[str]:
    """Returns the names of a job's EndpointSlices; none for a single host, which calls itself localhost.

    All attempts on a slice share these names, so whatever an operator with a stale view publishes is overwritten.
    """
    if layout.hosts == 1:
        return []
    return [f"{job}-{index}" for index in range(math.ceil(layout.hosts / _MOST_ENDPOINTS))]


def publication(
    job: TPUTrainingJob, layout: SliceLayout, pods: Sequence[WorkerPod], published: str | None
) -> Publish | None:
    """Returns the action that makes the workers' names resolve. `pods`: all workers of one attempt, in order.

    Returns None while one of them has no address, or if these addresses have been `published`.
    """
    if layout.hosts == 1 or (addresses := _addresses(pods)) is None:
        return None
    members = list(zip(pods, addresses, strict=True))
    lines = (f"{pod.uid} {pod.node} {address}" for pod, address in members)
    version = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if version == published:
        return None
    return Publish((*_endpoint_slices(job, layout, members), _endpoints(job, layout, members)), version)


def _addresses(pods: Sequence[WorkerPod]) -> list[Address] | None:
    """Returns one address of each pod, all of the family that worker 0 has first; None until every pod has one.

    On a dual-stack cluster that is the cluster's first family. With two addresses per worker, peers would meet over one
    family and exchange gradients over the other.
    """
    first = _usable_addresses(pods[0])
    of_family = [
        next((a for a in _usable_addresses(pod) if a.version == first[0].version), None) for pod in pods if first
    ]
    addresses = [address for address in of_family if address is not None]
    return addresses if len(addresses) == len(pods) else None


def _usable_addresses(pod: WorkerPod) -> list[Address]:
    """Returns the pod's addresses without those that the API server refuses: one of them would keep all names from
    resolving."""
    usable = []
    for text in pod.addresses:
        with suppress(ValueError):
            address = ip_address(text)
            is_special = address.is_unspecified or address.is_loopback or address.is_link_local or address.is_multicast
            if not is_special and not (isinstance(address, IPv6Address) and (address.ipv4_mapped or address.scope_id)):
                usable.append(address)
    return usable


def _endpoint_slices(job: TPUTrainingJob, layout: SliceLayout, members: Sequence[_Member]) -> list[Object]:
    labels = naming.job_labels(job.name) | {
        _SERVICE_NAME: naming.service_name(job.name),
        _MANAGED_BY: constants.MANAGER,
        _HEADLESS: "",
    }
    endpoints = [_endpoint(job, layout, pod, address) for pod, address in members]
    return [
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": metadata(job, name, labels),
            "addressType": f"IPv{members[0][1].version}",
            "endpoints": endpoints[index * _MOST_ENDPOINTS : (index + 1) * _MOST_ENDPOINTS],
        }
        for index, name in enumerate(endpoint_slice_names(job.name, layout))
    ]


def _endpoint(job: TPUTrainingJob, layout: SliceLayout, pod: WorkerPod, address: Address) -> Object:
    """Returns an endpoint that counts as ready, because workers have to meet before they become ready."""
    return {
        "addresses": [str(address)],
        "conditions": {"ready": True},
        "hostname": naming.hostname(layout, pod.worker),
        "nodeName": pod.node,
        "targetRef": {"kind": "Pod", "namespace": job.namespace, "name": pod.name, "uid": pod.uid},
    }


def _endpoints(job: TPUTrainingJob, layout: SliceLayout, members: Sequence[_Member]) -> Object:
    """Returns one object for all hosts, named after the Service, which is where kube-dns looks."""
    listed = [{"ip": str(address), "hostname": naming.hostname(layout, pod.worker)} for pod, address in members]
    labels = naming.job_labels(job.name) | {_NOT_COPIED: "true"}
    return {
        "apiVersion": "v1",
        "kind": "Endpoints",
        "metadata": metadata(job, naming.service_name(job.name), labels),
        "subsets": [{"addresses": listed}],
    }


def content(body: Mapping[str, Any]) -> Object:
    """Returns the content of a published object without what the API server adds."""
    return {name: body.get(name) for name in ("addressType", "endpoints", "subsets") if name in body}
