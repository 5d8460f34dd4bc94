"""Every name that leaves the process: API group, labels, node labels, environment variables, paths, ports.

They stand in one place because users, dashboards and node pools depend on them.
"""

from tpu_contract.slice_check import CheckMode

GROUP = "tpu-operator.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "TPUTrainingJob"
PLURAL = "tputrainingjobs"
RESOURCE_NAME = f"{KIND.lower()}.{GROUP}"
"""What `kubectl -o name` prints before a job's name."""

MANAGER = "tpu-training-operator"
# In spec.managedBy, means this operator, as if the field were left out.
MANAGED_BY_US = f"{GROUP}/{MANAGER}"

# The prefix of the labels and annotations that only the operator sets.
OWN_PREFIX = f"{GROUP}/"
LABEL_JOB_NAME = f"{GROUP}/job-name"
LABEL_ATTEMPT = f"{GROUP}/attempt"
LABEL_SLICE_INDEX = f"{GROUP}/slice-index"
LABEL_HOST_INDEX = f"{GROUP}/host-index"
WORKER_LABELS = (LABEL_ATTEMPT, LABEL_SLICE_INDEX, LABEL_HOST_INDEX)
# The role of a pod of the job that is not a worker.
LABEL_ROLE = f"{GROUP}/role"
ROLE_ENTRY_CHECK = "entry-check"
LABEL_SLICE_ID = f"{GROUP}/slice-id"
# The number of the option that a worker runs on; absent for spec.slice.
LABEL_ALTERNATIVE = f"{GROUP}/alternative"

# GKE's own names, which its scheduler, autoscaler and TPU device plugin read.
TPU_RESOURCE = "google.com/tpu"
NODE_LABEL_ACCELERATOR = "cloud.google.com/gke-tpu-accelerator"
NODE_LABEL_TOPOLOGY = "cloud.google.com/gke-tpu-topology"
NODE_LABEL_CHIPS_PER_HOST = "cloud.google.com/gke-accelerator-count"
NODE_LABEL_SPOT = "cloud.google.com/gke-spot"
NODE_LABEL_RESERVATION = "cloud.google.com/reservation-name"
NODE_LABEL_RESERVATION_PROJECT = "cloud.google.com/reservation-project"
NODE_LABEL_RESERVATION_BLOCK = "cloud.google.com/reservation-blocks"
NODE_LABEL_RESERVATION_SUBBLOCK = "cloud.google.com/reservation-subblocks"
NODE_LABEL_RESERVATION_AFFINITY = "cloud.google.com/reservation-affinity"
NODE_LABEL_FLEX_START = "cloud.google.com/gke-flex-start"
NODE_LABEL_QUEUED = "cloud.google.com/gke-queued"
NODE_LABEL_ZONE = "topology.kubernetes.io/zone"
NODE_LABEL_REGION = "topology.kubernetes.io/region"
NODE_LABEL_NODE_POOL = "cloud.google.com/gke-nodepool"
# The same on all nodes of a dynamic slice, and of a sub-slice of this topology. The annotation, on the pods, tells the
# device plugin the topology.
NODE_LABEL_DYNAMIC_SLICE = "cloud.google.com/gke-tpu-slice"
NODE_LABEL_SUB_SLICE = "cloud.google.com/gke-tpu-slice-{topology}-id"
ANNOTATION_SLICE_TOPOLOGY = "cloud.google.com/gke-tpu-slice-topology"

# Kueue's own names. The first label, on the job, puts the job into a queue.
KUEUE_GROUP = "kueue.x-k8s.io"
LABEL_QUEUE = f"{KUEUE_GROUP}/queue-name"
LABEL_QUEUE_PRIORITY = f"{KUEUE_GROUP}/priority-class"
LABEL_POD_GROUP = f"{KUEUE_GROUP}/pod-group-name"
# In spec.managedBy of the job that the user created. On the copy in the other cluster, Kueue writes the name of the
# copy's Workload (a label; since 0.18 possibly an annotation) and the job's origin.
MULTIKUEUE = f"{KUEUE_GROUP}/multikueue"
PREBUILT_WORKLOAD = f"{KUEUE_GROUP}/prebuilt-workload-name"
LABEL_MULTIKUEUE_ORIGIN = f"{KUEUE_GROUP}/multikueue-origin"
# The scheduling gate with which Kueue's pod integration holds a pod.
KUEUE_POD_GATE = f"{KUEUE_GROUP}/admission"
# An administrator lists it under integrations.externalFrameworks, so that the integration leaves workers alone.
KUEUE_FRAMEWORK = f"{KIND}.{VERSION}.{GROUP}"
# On the Workload of a job: a digest of the workers for which the operator made it.
ANNOTATION_WORKERS = f"{GROUP}/workers"
# On pods: the name of the ProvisioningRequest whose nodes they use.
ANNOTATION_PROVISIONING = "autoscaling.x-k8s.io/consume-provisioning-request"

CONTAINER_NAME = "trainer"
TRAINER_COMMAND = ["python", "-m", "tpu_trainer"]
CHECK_COMMAND = ["python", "-m", "tpu_trainer", "entry-check"]
# What checks the slice: all of it, in place of a training, or within seconds, before the training or the command that
# follows.
SLICE_CHECK_COMMAND = ["python", "-m", "tpu_trainer", "slice-check", CheckMode.FULL.value]
FAST_SLICE_CHECK_COMMAND = ["python", "-m", "tpu_trainer", "slice-check", CheckMode.FAST.value]
RUN_SPEC_DIRECTORY = "/etc/tpu-training"
RUN_SPEC_FILE = "run.json"
# The program that starts a command in the unpacked code, the directory of that code, and that of its archive if a
# ConfigMap brings it.
CODE_COMMAND = ["python", "-m", "tpu_trainer", "run-command"]
CODE_DIRECTORY = "/tpu-training/code"
CODE_ARCHIVE_DIRECTORY = "/tpu-training/archive"
CODE_ARCHIVE_KEY = "code.tar.gz"
TERMINATION_LOG = "/dev/termination-log"
RENDEZVOUS_PORT = 12355
MEGASCALE_PORT = 8080

# Where worker 0 finds the operator's certificate authority and its own token, and the audience of that token.
PROGRESS_AUDIENCE = f"{GROUP}/progress"
PROGRESS_DIRECTORY = f"/var/run/secrets/{GROUP}/progress"
PROGRESS_TOKEN_FILE = f"{PROGRESS_DIRECTORY}/token"
PROGRESS_CA_FILE = f"{PROGRESS_DIRECTORY}/ca.crt"
CA_CERTIFICATE_KEY = "ca.crt"

# A job's name is the name of a Service (an RFC 1035 label of 63 characters) and begins its pods' names, which add
# "-<attempt>-<slice>-<host>" with up to 5 + 3 + 4 digits.
MAX_JOB_NAME_LENGTH = 48

# The most nodes that Kubernetes is tested with; a gang cannot be larger than its cluster.
MAX_HOSTS = 5000

# The most bytes that the API server accepts as the values of one ConfigMap or Secret, counted before base64.
LARGEST_CONFIG_MAP = LARGEST_SECRET = 2**20
# The most characters of each key there.
LONGEST_KEY = 253

# Linux allows 128 KiB for one environment string (MAX_ARG_STRLEN), including its name and the final zero.
MAX_HOST_NAMES_LENGTH = 128 * 1024 - len("TPU_WORKER_HOSTNAMES=") - 1

# The operator sets these in every worker, or torch_xla and libtpu set them for themselves. A user's value would be
# overridden, or would break the gang in ways that only show as a hang.
ENV_PREFIX = "TPUJOB_"
RESERVED_ENV = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "PJRT_DEVICE",
    "PET_NNODES",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "JOB_COMPLETION_INDEX",
    "TPU_WORKER_ID",
    "TPU_WORKER_HOSTNAMES",
    "TPU_PROCESS_ADDRESSES",
    "TPU_PROCESS_BOUNDS",
    "TPU_PROCESS_PORT",
    "TPU_CHIPS_PER_PROCESS_BOUNDS",
    "TPU_VISIBLE_CHIPS",
    "TPU_SKIP_MDS_QUERY",
    "CLOUD_TPU_TASK_ID",
    "MEGASCALE_COORDINATOR_ADDRESS",
    "MEGASCALE_NUM_SLICES",
    "MEGASCALE_PORT",
    "MEGASCALE_SLICE_ID",
    "KUBEFLOW_TRAINER_SERVER_URL",
    "KUBEFLOW_TRAINER_SERVER_TOKEN",
    "KUBEFLOW_TRAINER_SERVER_CA_CERT",
)
