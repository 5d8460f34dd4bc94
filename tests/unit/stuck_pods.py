"""Pods that have their node and never start, for every such row of the classifier's table. Used by the tests of the
classifier and of docs/failures.md."""

from tests.unit.ended_pods import NO_PROGRAM
from tests.unit.kubelet_statuses import IMAGE, FailedPod, held_up, runc


def pull_error(message: str) -> str:
    return f'failed to pull and unpack image "{IMAGE}": failed to resolve reference "{IMAGE}": {message}'


def backs_off(message: str) -> str:
    return f'Back-off pulling image "{IMAGE}": ErrImagePull: {message}'


NOT_FOUND = "rpc error: code = NotFound desc = " + pull_error("not found")
DENIED = "rpc error: code = Unknown desc = " + pull_error(
    "pull access denied, repository does not exist or may require authorization: "
    "server message: insufficient_scope: authorization failed"
)
NO_HOST = "rpc error: code = Unknown desc = " + pull_error("dial tcp: lookup registry.example: no such host")
NO_CHIP = (
    'failed to generate container "8d2" spec: failed to generate spec: lstat /dev/accel0: no such file or directory'
)
AS_ROOT = (
    'container has runAsNonRoot and image will run as root (pod: "digits-1-0-0_default(4d5f)", container: trainer)'
)
BY_NAME = "container has runAsNonRoot and image has non-numeric user (app), cannot verify user is non-root"
NAME_TAKEN = 'failed to create containerd container: snapshot "8d2": already exists'
CGROUP_BUSY = (
    "unable to start container process: unable to apply cgroup configuration: failed to write 4711: "
    "write /sys/fs/cgroup/kubepods.slice/cgroup.procs: device or resource busy"
)
NO_SUCH_KEY = "couldn't find key token in Secret default/hub"

STUCK = (
    FailedPod(
        "an image's name that is none",
        held_up("InvalidImageName", "couldn't parse image name: invalid reference format"),
        "UserError",
        "InvalidImageName",
        "couldn't parse image name: invalid reference format",
        at=0,
    ),
    FailedPod(
        "an image that is not there and may not be pulled",
        held_up("ErrImageNeverPull", f'Container image "{IMAGE}" is not present with pull policy of Never'),
        "UserError",
        "ErrImageNeverPull",
        f'Container image "{IMAGE}" is not present with pull policy of Never',
        at=0,
    ),
    FailedPod(
        "an image that may not be read",
        held_up("ImagePullBackOff", backs_off(DENIED)),
        "UserError",
        "ImagePullDenied",
        backs_off(DENIED),
        at=120,
    ),
    FailedPod(
        "an image that does not exist, when it is backed off from",
        held_up("ImagePullBackOff", backs_off(NOT_FOUND)),
        "UserError",
        "ImageNotFound",
        backs_off(NOT_FOUND),
        at=0,
    ),
    FailedPod(
        "an image that does not exist, by a kubelet that says so only as it tries",
        held_up("ErrImagePull", NOT_FOUND),
        "UserError",
        "ImageNotFound",
        NOT_FOUND,
        at=60,
    ),
    FailedPod(
        "an image of a container that a webhook has added",
        held_up("ImagePullBackOff", backs_off(NOT_FOUND), "mount"),
        "UserError",
        "ImageNotFound",
        backs_off(NOT_FOUND),
        at=0,
    ),
    FailedPod(
        "a registry that does not answer",
        held_up("ImagePullBackOff", backs_off(NO_HOST)),
        "Infrastructure",
        "ImagePullFailed",
        backs_off(NO_HOST),
        at=300,
    ),
    FailedPod(
        "a chip that the runtime does not find",
        held_up("CreateContainerError", NO_CHIP),
        "Infrastructure",
        "DeviceFailed",
        NO_CHIP,
        at=60,
    ),
    FailedPod(
        "a runtime that does not answer",
        held_up("CreateContainerError", "context deadline exceeded"),
        "Infrastructure",
        "ContainerNotCreated",
        "context deadline exceeded",
        at=300,
    ),
    FailedPod(
        "a Secret without the key",
        held_up("CreateContainerConfigError", NO_SUCH_KEY),
        "UserError",
        "CreateContainerConfigError",
        NO_SUCH_KEY,
        at=60,
    ),
    *(
        FailedPod(
            f"an image whose user is {user}",
            held_up("CreateContainerConfigError", said),
            "UserError",
            "RootImage",
            "the image's user is root, or is known by name only; set trainer.securityContext.runAsUser to the number of"
            f" the user to run as (0 for root): {said}",
            at=0,
        )
        for user, said in (("root", AS_ROOT), ("a name", BY_NAME))
    ),
    FailedPod(
        "an image without a command",
        held_up("CreateContainerError", "failed to generate container spec: no command specified"),
        "UserError",
        "CannotStart",
        "failed to generate container spec: no command specified",
        at=60,
    ),
    FailedPod(
        "a command that is not in the image, before the runtime's error is the container's end",
        held_up("RunContainerError", runc(NO_PROGRAM)),
        "UserError",
        "CannotStart",
        runc(NO_PROGRAM),
        at=60,
    ),
    FailedPod(
        "a container that the runtime does not create",
        held_up("CreateContainerError", NAME_TAKEN),
        "Unknown",
        "CreateContainerError",
        NAME_TAKEN,
        at=60,
    ),
    FailedPod(
        "a container that the runtime does not run",
        held_up("RunContainerError", runc(CGROUP_BUSY)),
        "Unknown",
        "RunContainerError",
        runc(CGROUP_BUSY),
        at=60,
    ),
)
