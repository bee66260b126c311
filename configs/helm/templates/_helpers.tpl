{{- /* Labels of everything that belongs to this job, and of nothing else in the namespace. */}}
{{- define "paramserver.labels" -}}
app.kubernetes.io/part-of: paramserver
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* Labels of a component. Takes a dict of root and component. */}}
{{- define "paramserver.component" -}}
{{ include "paramserver.labels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "paramserver.image" -}}
{{ .tasks.image | default (printf "%s:%s" .root.Values.image.repository .root.Values.image.tag) }}
{{- end }}

{{- /* The address of a server, or of a standby one, of which a Job or a StatefulSet is the controller. Takes a dict of root,
kind (ps or ps-standby) and index, which may be a reference to a variable. */}}
{{- define "paramserver.address" -}}
{{- $name := .root.Release.Name -}}
{{- if eq .root.Values.controller "jobset" -}}
{{ $name }}-{{ .kind }}-0-{{ .index }}.{{ $name }}:2222
{{- else -}}
{{ $name }}-{{ .kind }}-{{ .index }}.{{ $name }}-ps:2222
{{- end -}}
{{- end }}

{{- /* The addresses of all servers, with commas. */}}
{{- define "paramserver.addresses" -}}
{{- $root := . -}}
{{- range $index := until (int .Values.servers.count) -}}
{{- if $index }},{{ end }}{{ include "paramserver.address" (dict "root" $root "kind" "ps" "index" $index) }}
{{- end -}}
{{- end }}

{{- /* The cluster of TF_CONFIG. Only servers listen; the addresses of the others are names. */}}
{{- define "paramserver.cluster" -}}
{{- $workers := list -}}
{{- range $index := until (int .Values.workers.count) -}}
{{- $workers = append $workers (printf "worker-%d:0" $index) -}}
{{- end -}}
{{- $servers := splitList "," (include "paramserver.addresses" .) -}}
{{ dict "ps" $servers "worker" $workers "chief" (list "chief-0:0") | toJson }}
{{- end }}

{{- /* How many tasks of a kind there are. */}}
{{- define "paramserver.count" -}}
{{- get (dict "ps" .root.Values.servers.count "ps-standby" .root.Values.servers.standbys "chief" 1 "worker" .root.Values.workers.count) .kind | int -}}
{{- end }}

{{- define "paramserver.volume" -}}
{{- not (contains "://" .Values.checkpoints.root) | ternary "volume" "" -}}
{{- end }}

{{- define "paramserver.tokenSecret" -}}
{{ .Values.certificates.tokenSecret | default (printf "%s-token" .Release.Name) }}
{{- end }}

{{- /* The spec of an Indexed Job. Takes a dict of root and kind: ps, ps-standby, chief or worker. */}}
{{- define "paramserver.jobSpec" -}}
{{- $count := include "paramserver.count" . -}}
{{- $program := hasPrefix "ps" .kind | ternary "psserver" "psworker" -}}
{{- $final := eq .kind "chief" | ternary (list 2 69) (list 2) -}}
completionMode: Indexed
completions: {{ $count }}
parallelism: {{ $count }}
{{- if eq .kind "chief" }}
backoffLimit: {{ .root.Values.retries }}
{{- else }}
backoffLimitPerIndex: {{ .root.Values.retries }}
{{- end }}
podFailurePolicy:
  rules:
    - action: Ignore
      onPodConditions: [{type: DisruptionTarget}]
    # A server was lost, whose own failure is the one that counts (75); a server was cut off, and the job goes on (76).
    - action: Ignore
      onExitCodes: {containerName: {{ $program }}, operator: In, values: [{{ eq $program "psserver" | ternary 76 75 }}]}
    {{- if and (eq .kind "chief") (eq .root.Values.controller "statefulset") }}
    {{- $final = list 2 }}
    {{- end }}
    # A wrong setting (2), or a job that was given up (69), which another attempt of this task alone would not cure.
    - action: FailJob
      onExitCodes: {containerName: {{ $program }}, operator: In, values: {{ $final | toJson }}}
template:
  {{- include "paramserver.template" . | nindent 2 }}
{{- end }}

{{- /* The template of a pod. Takes a dict of root and kind: ps, ps-standby, chief or worker. */}}
{{- define "paramserver.template" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $kind := .kind -}}
{{- $server := hasPrefix "ps" $kind -}}
{{- $component := $server | ternary "ps" $kind -}}
{{- $program := $server | ternary "psserver" "psworker" -}}
{{- $tasks := get $values (get (dict "ps" "servers" "chief" "chief" "worker" "workers") $component) -}}
{{- $tfjob := eq $values.controller "tfjob" -}}
{{- $standing := and (eq $values.controller "statefulset") (eq $kind "ps") -}}
metadata:
  labels:
    {{- include "paramserver.component" (dict "root" $root "component" $component) | nindent 4 }}
  annotations: {prometheus.io/scrape: "true", prometheus.io/port: "9090", prometheus.io/scheme: https}
spec:
  {{- if and $server (eq $values.controller "job") }}
  subdomain: {{ $root.Release.Name }}-ps
  {{- end }}
  {{- if not (or $standing $tfjob) }}
  restartPolicy: Never
  {{- end }}
  serviceAccountName: {{ $root.Release.Name }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: 30
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - {name: {{ . }}}
    {{- end }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    seccompProfile: {type: RuntimeDefault}
  {{- if $server }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: {{ $values.spread.topologyKey }}
      whenUnsatisfiable: {{ $values.spread.whenUnsatisfiable }}
      labelSelector:
        matchLabels:
          {{- include "paramserver.component" (dict "root" $root "component" "ps") | nindent 10 }}
  {{- end }}
  {{- with $tasks.nodeSelector }}
  nodeSelector: {{ toJson . }}
  {{- end }}
  {{- with $tasks.tolerations }}
  tolerations: {{ toJson . }}
  {{- end }}
  {{- with $tasks.affinity }}
  affinity: {{ toJson . }}
  {{- end }}
  containers:
    - name: {{ $tfjob | ternary "tensorflow" $program }}
      image: {{ include "paramserver.image" (dict "root" $root "tasks" $tasks) }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command: [{{ $program }}]
      {{- if $server }}
      args:
        {{- if eq $kind "ps-standby" }}
        - --join={{ include "paramserver.addresses" $root }}
        - --port=2222
        - --advertise={{ include "paramserver.address" (dict "root" $root "kind" "ps-standby" "index" "$(INDEX)") }}
        {{- end }}
        - --host=0.0.0.0
        - --data-port=2223
        - --shared-memory=0
        - --memory-limit={{ $tasks.memoryLimit }}
        - --checkpoint-root={{ $values.checkpoints.root }}
        - --until-done
        {{- range $tasks.args }}
        - {{ quote . }}
        {{- end }}
      {{- else if eq $kind "worker" }}
      args:
        {{- range $tasks.args }}
        - {{ quote . }}
        {{- end }}
      {{- end }}
      envFrom:
        - configMapRef: {name: {{ $root.Release.Name }}-settings}
      env:
        # A container sees all cores of its node, and in TF_CONFIG each pod is a host of its own.
        - name: OMP_NUM_THREADS
          valueFrom: {resourceFieldRef: {resource: requests.cpu, divisor: "1"}}
        {{- if $server }}
        - name: PS_DOMAIN  # copies go to another node
          valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
        {{- end }}
        {{- if $tfjob }}
        - name: KIND
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['training.kubeflow.org/replica-type']"}}
        - name: INDEX
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['training.kubeflow.org/replica-index']"}}
        - name: TASK
          value: $(KIND)-$(INDEX)
        {{- else }}
        - name: INDEX
          {{- if $standing }}
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}
          {{- else }}
          valueFrom: {fieldRef: {fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
          {{- end }}
        - name: TASK
          value: {{ $kind }}-$(INDEX)
        {{- if ne $kind "ps-standby" }}
        - name: CLUSTER
          valueFrom: {configMapKeyRef: {name: {{ $root.Release.Name }}-settings, key: cluster}}
        - name: TF_CONFIG
          value: '{"cluster": $(CLUSTER), "task": {"type": "{{ $kind }}", "index": $(INDEX)}}'
        {{- end }}
        {{- end }}
      ports:
        {{- if or $server $tfjob }}
        - {name: {{ $tfjob | ternary "tfjob-port" "grpc" }}, containerPort: 2222}
        {{- end }}
        {{- if $server }}
        - {name: data, containerPort: 2223}
        {{- end }}
        - {name: metrics, containerPort: 9090}
      {{- if eq $kind "ps" }}
      startupProbe:
        httpGet: {path: /metrics, port: metrics, scheme: HTTPS}
        periodSeconds: 2
        failureThreshold: 60
      livenessProbe:
        httpGet: {path: /metrics, port: metrics, scheme: HTTPS}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      {{- end }}
      {{- if $server }}
      # The kubelet's own gRPC probe speaks no TLS; /healthz says what the gRPC health service says.
      readinessProbe:
        httpGet: {path: /healthz, port: metrics, scheme: HTTPS}
        periodSeconds: 5
      {{- end }}
      resources: {{ toJson $tasks.resources }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      volumeMounts:
        - {name: certificates, mountPath: /certs/tls.crt, subPathExpr: $(TASK).crt, readOnly: true}
        - {name: certificates, mountPath: /certs/tls.key, subPathExpr: $(TASK).key, readOnly: true}
        - {name: certificates, mountPath: /certs/ca.crt, subPath: ca.crt, readOnly: true}
        - {name: certificates, mountPath: /certs/token, subPath: token, readOnly: true}
        {{- if and $server (include "paramserver.volume" $root) }}
        - {name: checkpoints, mountPath: {{ $values.checkpoints.root }}}
        {{- end }}
        - {name: tmp, mountPath: /tmp}
  volumes:
    - name: certificates
      {{- if eq $values.certificates.source "secret" }}
      secret: {secretName: {{ $values.certificates.secret | default (printf "%s-certificates" $root.Release.Name) }}, defaultMode: 0440}
      {{- else }}
      projected:
        defaultMode: 0440
        sources:
          {{- range $index := until (include "paramserver.count" (dict "root" $root "kind" $kind) | int) }}
          {{- $task := printf "%s-%d" $kind $index }}
          - secret:
              name: {{ $root.Release.Name }}-{{ $task }}-tls
              items:
                - {key: tls.crt, path: {{ $task }}.crt}
                - {key: tls.key, path: {{ $task }}.key}
                {{- if not $index }}
                - {key: ca.crt, path: ca.crt}
                {{- end }}
          {{- end }}
          - secret:
              name: {{ include "paramserver.tokenSecret" $root }}
              items: [{key: token, path: token}]
      {{- end }}
    {{- if and $server (include "paramserver.volume" $root) }}
    - name: checkpoints
      persistentVolumeClaim: {claimName: {{ $values.checkpoints.existingClaim | default (printf "%s-checkpoints" $root.Release.Name) }}}
    {{- end }}
    - name: tmp
      emptyDir: {}
{{- end }}

{{/* The Secret that has the CA's certificate, as ca.crt. */}}
{{- define "paramserver.rootSecret" -}}
{{- if eq .Values.certificates.source "secret" -}}
{{ .Values.certificates.secret | default (printf "%s-certificates" .Release.Name) }}
{{- else -}}
{{ printf "%s-ps-0-tls" .Release.Name }}
{{- end -}}
{{- end }}
