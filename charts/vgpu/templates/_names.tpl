{{- define "vgpu.name" -}}
{{- default .Chart.Name .Values.nameOverride -}}
{{- end -}}

{{- define "vgpu.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains (include "vgpu.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "vgpu.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "vgpu.scheduler" -}}{{ include "vgpu.fullname" . }}-scheduler{{- end -}}

{{- define "vgpu.devicePlugin" -}}{{ include "vgpu.fullname" . }}-device-plugin{{- end -}}

{{- define "vgpu.cleanUp" -}}{{ include "vgpu.fullname" . }}-clean-up{{- end -}}

{{- /* Metadata of what `helm uninstall` makes and removes. Arguments: root context, and the order: lower is earlier. */ -}}
{{- define "vgpu.cleanUpMeta" -}}
labels:
  {{- include "vgpu.labels" (list (index . 0) "clean-up") | nindent 2 }}
annotations:
  helm.sh/hook: pre-delete
  helm.sh/hook-weight: {{ index . 1 | quote }}
  helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}

{{- /* All taints but those of a node that is down. The API server would add tolerations of these for five minutes where a pod
       says nothing about them; what is said here is true of no taint. Argument: further tolerations, of which only those
       that name a taint count. */ -}}
{{- define "vgpu.tolerateAllButDown" -}}
- operator: Exists
  effect: NoSchedule
{{- range list "not-ready" "unreachable" }}
- key: node.kubernetes.io/{{ . }}
  operator: Equal
  value: never
  effect: NoExecute
{{- end }}
{{- range . }}
{{- if .key }}
- {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "vgpu.tlsSecret" -}}{{ include "vgpu.scheduler" . }}-tls{{- end -}}

{{- /* Argument: list of the root context and the component. */ -}}
{{- define "vgpu.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "vgpu.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "vgpu.labels" -}}
{{- $root := index . 0 -}}
{{ include "vgpu.selector" . }}
app.kubernetes.io/part-of: vgpu
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- /* Arguments: root context, image, tag that stands where the image names none, and the value that is the image. */ -}}
{{- define "vgpu.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- $registry := default $image.registry $root.Values.global.imageRegistry -}}
{{- if not $registry -}}
{{- fail (printf "%s.registry is empty: name the registry that you pushed the image to, such as registry.example.com (or docker.io), here or in global.imageRegistry; without it the container runtime would pull %s from its default registry, where anybody may own that name" (index . 3) $image.repository) -}}
{{- end -}}
{{- trimSuffix "/" $registry }}/{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ default (index . 2) $image.tag }}{{ end -}}
{{- end -}}

{{- /* The upstream version of the cluster: v1.32.3-eks-1 and v1.32.3+k3s1 are v1.32.3. */ -}}
{{- define "vgpu.kubeVersion" -}}
{{- regexFind "^v[0-9]+\\.[0-9]+\\.[0-9]+" .Capabilities.KubeVersion.Version -}}
{{- end -}}

{{- /* JSON list of the user names of one kind of service account, in this release and those beside it.
       Arguments: root context, suffix of the account's name. */ -}}
{{- define "vgpu.accounts" -}}
{{- $root := index . 0 -}}
{{- $suffix := index . 1 -}}
{{- $accounts := list (printf "system:serviceaccount:%s:%s-%s" $root.Release.Namespace (include "vgpu.fullname" $root) $suffix) -}}
{{- range $root.Values.otherReleases -}}
{{- $accounts = append $accounts (printf "system:serviceaccount:%s:%s-%s" .namespace .fullname $suffix) -}}
{{- end -}}
{{- toJson $accounts -}}
{{- end -}}

{{- /* JSON list of the resources that make a pod ours, totals included. */ -}}
{{- define "vgpu.resources" -}}
{{- toJson (list .Values.resourceName .Values.resourceMem .Values.resourceMemPercentage .Values.resourceCores .Values.resourcePriority "vgpu.io/memory" "vgpu.io/cores") -}}
{{- end -}}

{{- /* CEL: a pod, `object`, asks for something of ours. */ -}}
{{- define "vgpu.asks" -}}
(object.spec.containers + (has(object.spec.initContainers) ? object.spec.initContainers : []))
.exists(c, has(c.resources) && {{ include "vgpu.resources" . }}
.exists(name, (has(c.resources.limits) && name in c.resources.limits)
|| (has(c.resources.requests) && name in c.resources.requests)))
{{- end -}}

{{- /* JSON list of the labels that opt out of admission where they say "ignore", on a pod or on its namespace. */ -}}
{{- define "vgpu.optOuts" -}}
{{- toJson (list "vgpu.io/webhook" "4pd.io/webhook" "hami.io/webhook") -}}
{{- end -}}

{{- /* How the API server calls the scheduler for admission. */ -}}
{{- define "vgpu.webhookCall" -}}
admissionReviewVersions: [v1]
clientConfig:
  service:
    name: {{ include "vgpu.scheduler" . }}
    namespace: {{ .Release.Namespace }}
    path: /webhook
    port: 443
matchPolicy: Equivalent
# Containers that a later webhook adds are seen too; the patch is the same the second time.
reinvocationPolicy: IfNeeded
sideEffects: None
timeoutSeconds: 10
{{- end -}}
