"""The NetworkPolicy around one job: its workers reach each other, and nobody else reaches them.

What workers send to each other is neither encrypted nor, but for the rendezvous, authenticated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpu_training_operator.api import constants
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.domain.actions import Action, Create, Plan
from tpu_training_operator.domain.naming import job_labels
from tpu_training_operator.domain.objects.shared import metadata

Object = dict[str, Any]


@dataclass(frozen=True)
class Isolation:
    """`also`: further ingress rules of a NetworkPolicy, such as one for a Prometheus that reads libtpu's metrics."""

    also: tuple[Mapping[str, Any], ...] = ()

    def applied(self, decided: Plan, job: Mapping[str, Any]) -> Plan:
        """The plan; where it creates a gang, with the policy beside the gang's Service, before the first worker."""

        def with_policy(stage: Sequence[Action]) -> Sequence[Action]:
            # What a gang shares begins with its Service. No look further: the pods are thousands.
            makes_gang = any(isinstance(action, Create) and action.body["kind"] == "Service" for action in stage[:1])
            return (*stage, Create(self.network_policy(job), optional=True)) if makes_gang else stage

        return replace(decided, stages=tuple(with_policy(stage) for stage in decided.stages))

    def network_policy(self, job: Mapping[str, Any]) -> Object:
        of_job = TPUTrainingJob.model_validate(job)
        own = {"podSelector": {"matchLabels": {constants.LABEL_JOB_NAME: of_job.name}}}
        return {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata(of_job, of_job.name, job_labels(of_job.name)),
            "spec": {**own, "policyTypes": ["Ingress"], "ingress": [{"from": [own]}, *map(dict, self.also)]},
        }
