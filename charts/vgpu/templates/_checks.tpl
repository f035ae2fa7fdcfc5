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
