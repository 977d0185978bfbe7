{{/* Labels of every object. */}}
{{- define "xpu.labels" -}}
{{- include "xpu.labelsWith" (dict "root" . "own" dict) }}
{{- end }}

{{/* Labels of an object that has some of its own, which have priority over the common ones: a dict of root and own. */}}
{{- define "xpu.labelsWith" -}}
{{- $root := .root }}
{{- $chart := printf "%s-%s" $root.Chart.Name ($root.Chart.Version | replace "+" "_") }}
{{- $all := dict "app.kubernetes.io/part-of" "xpu-device-plugin" "helm.sh/chart" $chart }}
{{- $_ := set $all "app.kubernetes.io/instance" $root.Release.Name }}
{{- $_ := set $all "app.kubernetes.io/version" $root.Chart.AppVersion }}
{{- $_ := set $all "app.kubernetes.io/managed-by" $root.Release.Service }}
{{- include "xpu.mergedLabels" (list $root.Values.commonLabels $all .own) }}
{{- end }}

{{/* The labels of the pods of a part: a dict of root and name, and values where the part has podLabels. */}}
{{- define "xpu.partLabels" -}}
{{- $own := dict "app.kubernetes.io/name" .name "app.kubernetes.io/part-of" "xpu-device-plugin" }}
{{- include "xpu.mergedLabels" (list .root.Values.commonLabels (.values).podLabels $own) }}
{{- end }}

{{/* The labels of a list of dicts, each once. A later dict has priority. */}}
{{- define "xpu.mergedLabels" -}}
{{- $all := dict }}
{{- range . }}
{{- range $name, $value := . }}
{{- $_ := set $all $name $value }}
{{- end }}
{{- end }}
{{- toYaml $all }}
{{- end }}

{{/* What a container that uses files of the host needs where SELinux is on, in OpenShift. */}}
{{- define "xpu.seLinux" -}}
{{- if (.Values.openshift).enabled }}
seLinuxOptions: {type: spc_t}
{{- end }}
{{- end }}

{{/* The image of a part: a dict of root and name, and digest where the image is pinned. */}}
{{- define "xpu.image" -}}
{{- $image := .root.Values.image -}}
{{ $image.registry }}/{{ .name }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ default .root.Chart.AppVersion $image.tag }}{{ end }}
{{- end }}

{{/*
The objects of a manifest in files/, in the namespaces of this release: a dict of root and file. The manifests are those of
the kustomizations; their namespace xpu-system is the release's, and xpu-tenants the broker's.
*/}}
{{- define "xpu.objects" -}}
{{- $root := .root }}
{{- $namespaces := dict "xpu-system" $root.Release.Namespace "xpu-tenants" $root.Values.broker.namespace }}
{{- range regexSplit "(?m)^---$" (required (printf "the chart lacks %s" .file) ($root.Files.Get .file)) -1 }}
{{- $object := fromYaml . }}
{{- if $object.kind }}
{{- $metadata := $object.metadata }}
{{- if $metadata.namespace }}
{{- $_ := set $metadata "namespace" (get $namespaces $metadata.namespace) }}
{{- end }}
{{- if eq $object.kind "Namespace" }}
{{- $_ := set $metadata "name" (get $namespaces $metadata.name) }}
{{- end }}
{{- range $object.subjects }}
{{- $_ := set . "namespace" (get $namespaces .namespace) }}
{{- end }}
{{- if eq $object.kind "CustomResourceDefinition" }}
{{- if $root.Values.crds.keep }}
{{- $_ := set $metadata "annotations" (merge (dict "helm.sh/resource-policy" "keep") (default dict $metadata.annotations)) }}
{{- end }}
{{- end }}
{{- with (($object.spec).namespaceSelector).matchNames }}
{{- $_ := set $object.spec.namespaceSelector "matchNames" (list (get $namespaces "xpu-system") (get $namespaces "xpu-tenants")) }}
{{- end }}
{{- if and (eq $object.kind "PodMonitor") $root.Values.monitoring.secure }}
{{- range $object.spec.podMetricsEndpoints }}
{{- $token := dict "name" $root.Values.monitoring.tokenSecretName "key" "token" }}
{{- $_ := merge . (dict "scheme" "https" "tlsConfig" (dict "insecureSkipVerify" true) "authorization" (dict "credentials" $token)) }}
{{- end }}
{{- end }}
{{- $_ := set $metadata "labels" (merge (include "xpu.labels" $root | fromYaml) (default dict $metadata.labels)) }}
---
{{ toYaml $object }}
{{ end }}
{{- end }}
{{- end }}

{{/* Whether a part is on: "true" or nothing. */}}
{{- define "xpu.hasAgent" -}}
{{- if and .Values.agent.enabled (ne .Values.mode "infra") }}true{{ end }}
{{- end }}
{{- define "xpu.hasController" -}}
{{- if and .Values.controller.enabled (ne .Values.mode "direct") }}true{{ end }}
{{- end }}
{{- define "xpu.hasClaims" -}}
{{- if has .Values.mode (list "cluster" "tenant") }}true{{ end }}
{{- end }}
{{- define "xpu.hasWebhook" -}}
{{- if and (include "xpu.hasClaims" .) (include "xpu.hasController" .) (((.Values.admission).webhook).enabled) }}true{{ end }}
{{- end }}
{{- define "xpu.hasTaintRules" -}}
{{- if and (include "xpu.hasController" .) (has .Values.mode (list "cluster" "tenant")) .Values.controller.deviceTaintRulesAfter }}true{{ end }}
{{- end }}
{{- define "xpu.hasBroker" -}}
{{- if and .Values.broker.enabled (eq .Values.mode "infra") }}true{{ end }}
{{- end }}

{{/* How pods of a part are placed, by its values, and with what they pull their images: a dict of root, values, and name where its replicas should
be on different nodes. */}}
{{- define "xpu.placement" -}}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . }}
{{- end }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .values.affinity }}
affinity:
  {{- toYaml .values.affinity | nindent 2 }}
{{- else if .name }}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            app.kubernetes.io/name: {{ .name }}
{{- end }}
{{- end }}

{{/* A Deployment of xpu-controller and its PodDisruptionBudget: a dict of root, name, namespace, values and args, and webhook where it serves one. */}}
{{- define "xpu.controller" -}}
{{- $root := .root }}
{{- $values := .values }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .name }}
  namespace: {{ .namespace }}
  labels:
    app.kubernetes.io/name: {{ .name }}
    {{- include "xpu.labels" $root | nindent 4 }}
spec:
  replicas: {{ $values.replicas }}
  selector:
    matchLabels:
      app.kubernetes.io/name: {{ .name }}
  template:
    metadata:
      labels:
        {{- include "xpu.partLabels" . | nindent 8 }}
      {{- with $values.podAnnotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      serviceAccountName: {{ .name }}
      {{- include "xpu.placement" . | trim | nindent 6 }}
      containers:
      - name: {{ .name }}
        image: {{ include "xpu.image" (dict "root" $root "name" "xpu-controller" "digest" $root.Values.controller.digest) }}
        imagePullPolicy: {{ $root.Values.image.pullPolicy }}
        args:
        {{- toYaml .args | nindent 8 }}
        {{- if $root.Values.monitoring.secure }}
        - --metrics-secure
        {{- end }}
        {{- if .webhook }}
        - --webhook-bind-address=:9443
        - --webhook-cert-dir=/run/xpu-controller/webhook
        {{- end }}
        {{- with $values.extraArgs }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        env:
        - name: POD_NAMESPACE
          valueFrom:
            fieldRef:
              fieldPath: metadata.namespace
        - {name: GOMEMLIMIT, value: {{ $values.goMemLimit | quote }}}
        ports:
        - {name: metrics, containerPort: 8080, protocol: TCP}
        - {name: health, containerPort: 8081, protocol: TCP}
        {{- if .webhook }}
        - {name: webhook, containerPort: 9443, protocol: TCP}
        {{- end }}
        livenessProbe:
          httpGet: {path: /healthz, port: health}
          periodSeconds: 10
          failureThreshold: 6
        readinessProbe:
          httpGet: {path: /readyz, port: health}
          periodSeconds: 5
        resources:
          {{- toYaml $values.resources | nindent 10 }}
        securityContext:
          runAsNonRoot: true
          {{- if not ($root.Values.openshift).enabled }}
          runAsUser: 65532
          {{- end }}
          readOnlyRootFilesystem: true
          allowPrivilegeEscalation: false
          capabilities:
            drop: [ALL]
          seccompProfile:
            type: RuntimeDefault
        {{- with .webhook }}
        volumeMounts:
        - {name: webhook, mountPath: /run/xpu-controller/webhook, readOnly: true}
      volumes:
      - name: webhook
        secret: {secretName: {{ .secretName }}, optional: true}
        {{- end }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  namespace: {{ .namespace }}
  labels:
    {{- include "xpu.labels" $root | nindent 4 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      app.kubernetes.io/name: {{ .name }}
{{- end }}

{{/* Labels and annotations of what runs before the release is uninstalled: a dict of root and weight. */}}
{{- define "xpu.uninstallMetadata" -}}
labels:
  {{- include "xpu.labels" .root | nindent 2 }}
annotations:
  helm.sh/hook: pre-delete
  helm.sh/hook-weight: {{ .weight | quote }}
  helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
  helm.sh/hook-output-log-policy: hook-failed
{{- end }}
