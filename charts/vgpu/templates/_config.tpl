{{- /* The part of the values that vgpu/config.py reads; a test compares both. */ -}}
{{- define "vgpu.config" -}}
{{- $config := pick .Values "resourceName" "resourceMem" "resourceMemPercentage" "resourceCores" "resourcePriority" "schedulerName" "corePolicy" "simulate" -}}
{{- $_ := set $config "global" (pick .Values.global "gpuHookPath") -}}
{{- $_ := set $config "scheduler" (pick .Values.scheduler "defaultMem" "defaultCores" "nodePolicy" "gpuPolicy" "privileged" "visibleDevices" "foreignScheduler" "reconcileSeconds") -}}
{{- $_ := set $config "devicePlugin" (pick .Values.devicePlugin "deviceSplitCount" "deviceMemoryScaling" "deviceMemoryScalingByModel" "hostMemory" "memoryMode" "nodeOverrides" "deviceCoreScaling" "migStrategy" "disablecorelimit" "fillsOn" "copiesOn" "deviceListStrategy" "driverRoot" "kubeletRoot" "runtimeSocket" "ignoredXids" "recoverySeconds" "backstop" "bypass" "allowDisableControl") -}}
{{- toYaml $config -}}
{{- end -}}

{{- /* What a part starts anew for: only what it reads. */ -}}
{{- define "vgpu.schedulerHash" -}}
{{- printf "%s%s" (toYaml (omit (fromYaml (include "vgpu.config" .)) "devicePlugin" "global" "simulate")) (include "vgpu.kubeSchedulerConfig" .) | sha256sum -}}
{{- end -}}

{{- define "vgpu.devicePluginHash" -}}
{{- $config := fromYaml (include "vgpu.config" .) -}}
{{- $_ := set $config "scheduler" (pick $config.scheduler "defaultMem" "defaultCores") -}}
{{- toYaml $config | sha256sum -}}
{{- end -}}

{{- define "vgpu.kubeSchedulerConfig" -}}
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection:
  leaderElect: true
  resourceNamespace: {{ .Release.Namespace }}
  resourceName: {{ include "vgpu.scheduler" . }}
# Without this, a large cluster stops looking after a tenth of its nodes and misses the best card.
percentageOfNodesToScore: 100
profiles:
  - schedulerName: {{ .Values.schedulerName }}
extenders:
  - urlPrefix: http://127.0.0.1:{{ int .Values.scheduler.ports.extender }}
    filterVerb: filter
    prioritizeVerb: prioritize
    bindVerb: bind
    # A point of the extender counts 10 × weight; all stock score plugins together give at most 1200.
    weight: 125
    nodeCacheCapable: true
    ignorable: false
    httpTimeout: 30s
    # kube-scheduler counts {{ .Values.resourceName }} and the totals vgpu.io/memory and vgpu.io/cores itself.
    managedResources:
      - name: {{ .Values.resourceName }}
        ignoredByScheduler: false
      {{- range list .Values.resourceMem .Values.resourceMemPercentage .Values.resourceCores .Values.resourcePriority }}
      - name: {{ . }}
        ignoredByScheduler: true
      {{- end }}
{{- end -}}
