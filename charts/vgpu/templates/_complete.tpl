{{- /* Puts the default where a value is missing: `helm upgrade --reuse-values` brings the values of the old release alone, and
       those of this chart do not count. A list, a map or a port that is missing in a section is left so, since null removes it, too. */ -}}
{{- define "vgpu.complete" -}}
{{- $values := .Values -}}
{{- range include "vgpu.sections" . | fromYamlArray -}}
{{- $at := $values -}}
{{- $new := false -}}
{{- range .path -}}
{{- if not (hasKey $at .) -}}
{{- $_ := set $at . (dict) -}}
{{- $new = true -}}
{{- end -}}
{{- $at = get $at . -}}
{{- end -}}
{{- range $key, $value := (ternary (merge (dict) .single .rest) .single $new) -}}
{{- if not (hasKey $at $key) -}}
{{- $_ := set $at $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
