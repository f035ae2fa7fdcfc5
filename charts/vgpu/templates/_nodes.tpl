{{- /* JSON list of requirements that no node meets which only stands for others: no kubelet, no /dev, no host folders. Such a
       node keeps a pod of a DaemonSet Pending, or fails it, for ever. Labels: Virtual Kubelet and its providers (AKS, ACI, ECI,
       CCI) and KWOK; AWS Fargate; TKE super nodes; Liqo; virtual nodes of Oracle's OKE. */ -}}
{{- define "vgpu.realNodes" -}}
{{- $found := list (dict "key" "type" "operator" "NotIn" "values" (list "virtual-kubelet" "virtual-node" "kwok")) -}}
{{- $found = append $found (dict "key" "eks.amazonaws.com/compute-type" "operator" "NotIn" "values" (list "fargate")) -}}
{{- $found = append $found (dict "key" "node.kubernetes.io/instance-type" "operator" "NotIn" "values" (list "eklet")) -}}
{{- $found = append $found (dict "key" "liqo.io/type" "operator" "NotIn" "values" (list "virtual-node")) -}}
{{- $found = append $found (dict "key" "node-role.kubernetes.io/virtual-node" "operator" "DoesNotExist") -}}
{{- toJson $found -}}
{{- end -}}

{{- /* JSON list of the labels of control-plane nodes: kubeadm and most others; older ones; MicroK8s. */ -}}
{{- define "vgpu.controlPlaneLabels" -}}
{{- toJson (list "node-role.kubernetes.io/control-plane" "node-role.kubernetes.io/master" "node-role.kubernetes.io/controlplane" "node.kubernetes.io/microk8s-controlplane") -}}
{{- end -}}

{{- /* Affinity of one of the parts, as YAML: what its value says, and for each kind that it leaves out what the chart says.
       Arguments: root context, the value, and the component where its pods keep apart from one another, else "". */ -}}
{{- define "vgpu.affinity" -}}
{{- $root := index . 0 -}}
{{- $affinity := deepCopy (default (dict) (index . 1)) -}}
{{- if not (hasKey $affinity "nodeAffinity") -}}
{{- $terms := include "vgpu.realNodes" . | fromJsonArray -}}
{{- if not $root.Values.global.controlPlanes -}}
{{- range include "vgpu.controlPlaneLabels" . | fromJsonArray -}}
{{- $terms = append $terms (dict "key" . "operator" "DoesNotExist") -}}
{{- end -}}
{{- end -}}
{{- $selector := dict "nodeSelectorTerms" (list (dict "matchExpressions" $terms)) -}}
{{- $_ := set $affinity "nodeAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" $selector) -}}
{{- end -}}
{{- if and (index . 2) (not (hasKey $affinity "podAntiAffinity")) -}}
{{- $labels := dict "matchLabels" (include "vgpu.selector" (list $root (index . 2)) | fromYaml) -}}
{{- $apart := list -}}
{{- range $key, $weight := dict "kubernetes.io/hostname" 100 "topology.kubernetes.io/zone" 50 -}}
{{- $apart = append $apart (dict "weight" $weight "podAffinityTerm" (dict "topologyKey" $key "labelSelector" $labels)) -}}
{{- end -}}
{{- /* Preferred: on a cluster of one node both run there. */ -}}
{{- $_ := set $affinity "podAntiAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" $apart) -}}
{{- end -}}
{{- toYaml $affinity -}}
{{- end -}}
