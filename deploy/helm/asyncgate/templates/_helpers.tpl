{{- define "asyncgate.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "asyncgate.secret" -}}
{{- .Values.existingSecret | default (include "asyncgate.name" .) -}}
{{- end -}}

{{- define "asyncgate.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}

{{- define "asyncgate.selector" -}}
app.kubernetes.io/name: asyncgate
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "asyncgate.labels" -}}
{{ include "asyncgate.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
{{- end -}}

{{- define "asyncgate.pod" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "asyncgate.container" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: ["ALL"]
{{- end -}}

{{- define "asyncgate.mounts" -}}
{{- range $at, $file := .Values.files }}
- name: files-{{ $at }}
  mountPath: {{ $file.mountPath }}
  readOnly: true
{{- end }}
{{- end }}

{{- define "asyncgate.volumes" -}}
{{- range $at, $file := .Values.files }}
- name: files-{{ $at }}
  {{- if $file.secret }}
  secret:
    secretName: {{ $file.secret }}
    defaultMode: 0440
  {{- else }}
  configMap:
    name: {{ $file.configMap }}
  {{- end }}
{{- end }}
{{- end }}
