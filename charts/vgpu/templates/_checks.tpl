{{- /* Refuses what cannot work, with a sentence. */ -}}
{{- define "vgpu.check" -}}
{{- $names := list .Values.resourceName .Values.resourceMem .Values.resourceMemPercentage .Values.resourceCores .Values.resourcePriority -}}
{{- if ne (len $names) (len (uniq $names)) -}}
{{- fail (printf "resourceName, resourceMem, resourceMemPercentage, resourceCores and resourcePriority are %s: each must have a name of its own" (join ", " $names)) -}}
{{- end -}}
{{- $held := append $names .Values.schedulerName -}}
{{- $found := lookup "admissionregistration.k8s.io/v1" "MutatingWebhookConfiguration" "" "" -}}
{{- range $other := (default (dict) $found).items -}}
{{- $notes := default (dict) $other.metadata.annotations -}}
{{- $theirs := get $notes "vgpu.io/names" -}}
{{- $release := get $notes "meta.helm.sh/release-name" -}}
{{- $namespace := get $notes "meta.helm.sh/release-namespace" -}}
{{- if and $theirs (or (ne $release $.Release.Name) (ne $namespace $.Release.Namespace)) -}}
{{- range $name := splitList "," $theirs -}}
{{- if has $name $held -}}
{{- fail (printf "release %q in namespace %q already serves %q in this cluster: a second release needs other values of resourceName, resourceMem, resourceMemPercentage, resourceCores, resourcePriority and schedulerName, nodes of its own (devicePlugin.nodeSelector), other node ports, and an entry in otherReleases of the first one" $release $namespace $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "vgpu.checkNodes" . -}}
{{- include "vgpu.checkPorts" . -}}
{{- end -}}

{{- /* Refuses to leave out nodes that are needed: where all are control planes, or where one of them shares its cards. */ -}}
{{- define "vgpu.checkNodes" -}}
{{- if not (or .Values.global.controlPlanes (hasKey (default (dict) .Values.devicePlugin.affinity) "nodeAffinity")) -}}
{{- $labels := include "vgpu.controlPlaneLabels" . | fromJsonArray -}}
{{- $others := 0 -}}
{{- $control := list -}}
{{- $sharing := list -}}
{{- range (default (dict) (lookup "v1" "Node" "" "")).items -}}
{{- $own := default (dict) .metadata.labels -}}
{{- $is := false -}}
{{- range $labels }}{{ if hasKey $own . }}{{ $is = true }}{{ end }}{{ end -}}
{{- if not $is -}}
{{- $others = add1 $others -}}
{{- else -}}
{{- $control = append $control .metadata.name -}}
{{- if hasKey $own "vgpu.io/present" }}{{ $sharing = append $sharing .metadata.name }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if and $control (not $others) -}}
{{- fail (printf "every node of this cluster is a control plane (%s), and the chart leaves these alone: set global.controlPlanes=true" (join ", " $control)) -}}
{{- else if $sharing -}}
{{- fail (printf "the cards of %s are shared, which are control planes, and the chart leaves these alone: set global.controlPlanes=true, or drain these nodes of GPU pods and take the label vgpu.io/present off them" (join ", " $sharing)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Refuses node ports that another Service has: the API server would, with half of the release installed. */ -}}
{{- define "vgpu.checkPorts" -}}
{{- $root := . -}}
{{- $wanted := dict -}}
{{- if and (eq .Values.devicePlugin.service.type "NodePort") .Values.devicePlugin.service.httpPort -}}
{{- $_ := set $wanted (toString (int .Values.devicePlugin.service.httpPort)) (list "devicePlugin.service.httpPort" (printf "%s-metrics" (include "vgpu.devicePlugin" .))) -}}
{{- end -}}
{{- if and (eq .Values.scheduler.service.type "NodePort") .Values.scheduler.service.monitorPort -}}
{{- $_ := set $wanted (toString (int .Values.scheduler.service.monitorPort)) (list "scheduler.service.monitorPort" (printf "%s-metrics" (include "vgpu.scheduler" .))) -}}
{{- end -}}
{{- range (default (dict) (ternary (lookup "v1" "Service" "" "") (dict) (not (empty $wanted)))).items -}}
{{- $service := . -}}
{{- range default (list) .spec.ports -}}
{{- $port := toString (int (default 0 .nodePort)) -}}
{{- if hasKey $wanted $port -}}
{{- $ours := get $wanted $port -}}
{{- if not (and (eq $service.metadata.namespace $root.Release.Namespace) (eq $service.metadata.name (index $ours 1))) -}}
{{- fail (printf "node port %s is that of Service %s/%s already: remove what it belongs to (HAMi and 4paradigm's scheduler use the same ports), or set %s to another one, or to null for any that is free" $port $service.metadata.namespace $service.metadata.name (index $ours 0)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* JSON list of DaemonSets that look like other device plugins for these cards. */ -}}
{{- define "vgpu.otherPlugins" -}}
{{- $found := list -}}
{{- $own := include "vgpu.devicePlugin" . -}}
{{- range (default (dict) (lookup "apps/v1" "DaemonSet" "" "")).items -}}
{{- $name := .metadata.name -}}
{{- if and (ne $name $own) (regexMatch "nvidia-device-plugin|nvdp|hami-device-plugin|vgpu-device-plugin|gpushare-device-plugin|nvidia-gpu-device-plugin" $name) -}}
{{- $found = append $found (printf "%s/%s" .metadata.namespace $name) -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}
