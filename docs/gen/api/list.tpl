{{- define "gvList" -}}
# API

<!-- Made by crd-ref-docs from api/v1alpha1. Do not edit. -->

{{ range . }}{{ .Doc }}

API version `{{ .GroupVersionString }}`. All kinds but XPUPort are cluster-scoped; InterfaceConfig is no object of the
API server but the form of opaque parameters. Reasons of conditions, and what to do about each, are in
[conditions.md](conditions.md); examples are in [install.md](../how-to/install.md).

| kind | |
| --- | --- |
{{- $gv := . }}
{{- range .SortedKinds }}
| {{ $gv.TypeForKind . | markdownRenderTypeLink }} | {{ markdownRenderFieldDoc ($gv.TypeForKind .).Doc }} |
{{- end }}
{{ range .SortedTypes }}{{ template "type" . }}{{ end }}
{{- end -}}
{{- end -}}
