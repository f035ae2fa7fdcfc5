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
{{- end -}}
