{{- define "tpu-training-operator.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- /* <release>-<chart>, or only the release if its name contains the chart's. */ -}}
{{- define "tpu-training-operator.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) }}
{{- default $full .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "tpu-training-operator.selectorLabels" -}}
app.kubernetes.io/name: {{ include "tpu-training-operator.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "tpu-training-operator.labels" -}}
{{- $own := include "tpu-training-operator.selectorLabels" . | fromYaml }}
{{- $_ := set $own "app.kubernetes.io/version" .Chart.AppVersion }}
{{- $_ := set $own "app.kubernetes.io/managed-by" .Release.Service }}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_") }}
{{- merge $own .Values.commonLabels | toYaml }}
{{- end }}

{{- define "tpu-training-operator.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "tpu-training-operator.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name: name an existing account, or set serviceAccount.create" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "tpu-training-operator.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ default $.Chart.AppVersion .tag }}{{ end }}
{{- end -}}
{{- end }}

{{- /* What the operator's pod and the pod of `helm test` have in common: who they are, where they run, what they may. */ -}}
{{- define "tpu-training-operator.pod" -}}
serviceAccountName: {{ include "tpu-training-operator.serviceAccountName" . }}
automountServiceAccountToken: true
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
# No runAsUser: the image names a numeric user, and OpenShift assigns its own.
securityContext:
  {{- $own := dict "runAsNonRoot" true "seccompProfile" (dict "type" "RuntimeDefault") }}
  {{- merge $own .Values.podSecurityContext | toYaml | nindent 2 }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* The groups of alerts, as text: Prometheus has its own templates, which helm must not expand. */ -}}
{{- define "tpu-training-operator.alerts" -}}
{{- $text := .Files.Get "files/alerts.yaml" }}
{{- if .Values.metrics.runbookURL }}
{{- $text | replace "docs/metrics.md#" (printf "%s#" .Values.metrics.runbookURL) }}
{{- else }}
{{- regexReplaceAll "\n *runbook_url: .*" $text "" }}
{{- end }}
{{- end }}

{{- define "tpu-training-operator.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- /* Fails unless the cluster has the API: (list $ API "value that needs it" "what installs the API"). */ -}}
{{- define "tpu-training-operator.needs" -}}
{{- $root := index . 0 }}
{{- if not ($root.Capabilities.APIVersions.Has (index . 1)) }}
{{- $hint := "Where helm cannot ask the cluster (helm template), name the API with --api-versions." }}
{{- fail (printf "%s: the cluster has no %s; %s brings it. %s" (index . 2) (index . 1) (index . 3) $hint) }}
{{- end }}
{{- end }}

{{- /* All rights of the operator in the namespaces that it serves. No secrets, no nodes, no wildcards. It writes only
       the status of a job, and deletes the job when its time to live is over. */ -}}
{{- define "tpu-training-operator.rules" -}}
- apiGroups: [tpu-operator.dev]
  resources: [tputrainingjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [tpu-operator.dev]
  resources: [tputrainingjobs/status]
  verbs: [update]
# Some clusters require this for blockOwnerDeletion in owner references.
- apiGroups: [tpu-operator.dev]
  resources: [tputrainingjobs/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
# Whether it is being deleted: then nothing that happens to a worker is a failure.
- apiGroups: [""]
  resources: [namespaces]
  verbs: [get]
- apiGroups: [""]
  resources: [services]
  verbs: [get, create]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, create, delete]
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, create, update, delete]
# What kube-dns reads instead.
- apiGroups: [""]
  resources: [endpoints]
  verbs: [get, create, update]
{{- if .Values.workerNetworkPolicy.enabled }}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, create]
{{- end }}
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [list, create]
{{- if .Values.kueue.enabled }}
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [get, list, watch, create, update, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [update]
{{- end }}
{{- end }}
