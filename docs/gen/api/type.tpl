{{- define "type" -}}
{{- if markdownShouldRenderType . }}
## {{ .Name }}

{{ .Doc }}
{{ if .SortedReferences }}
Appears in:{{ range $i, $r := .SortedReferences }}{{ if $i }},{{ end }} {{ markdownRenderTypeLink $r }}{{ end }}
{{ end }}
{{- if .Members }}
| field | type | description | default | validation |
| --- | --- | --- | --- | --- |
{{- if .GVK }}
| `apiVersion` | string | `{{ .GVK.Group }}/{{ .GVK.Version }}` | | |
| `kind` | string | `{{ .GVK.Kind }}` | | |
{{- end }}
{{- range .Members }}
| `{{ .Name }}` | {{ markdownRenderType .Type }} | {{ template "description" . }} | {{ markdownRenderDefault .Default }} | {{ template "validation" . }} |
{{- end }}
{{ end }}
{{- if .EnumValues }}
| value | meaning |
| --- | --- |
{{- range .EnumValues }}
| `{{ .Name }}` | {{ markdownRenderFieldDoc .Doc }} |
{{- end }}
{{ end }}
{{- end -}}
{{- end -}}

{{- define "description" -}}
{{ if eq .Name "metadata" }}Of every Kubernetes object.{{ else }}{{ markdownRenderFieldDoc .Doc }}{{ end }}
{{- end -}}

{{- define "validation" -}}
{{ range .Validation }}{{ if ne (printf "%.9s" .) "Optional:" }}{{ markdownRenderFieldDoc . }}<br />{{ else }}optional<br />{{ end }}{{ end }}
{{- end -}}
