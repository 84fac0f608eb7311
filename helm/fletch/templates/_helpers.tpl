{{- define "fletch.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- /* The prefix of all names. It leaves room for suffixes within the 63 characters of a label. */ -}}
{{- define "fletch.fullname" -}}
{{- $name := include "fletch.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 45 | trimSuffix "-" -}}
{{- end -}}

{{- /* Labels that select pods. Arguments: the root context, and the component. */ -}}
{{- define "fletch.selector" -}}
app.kubernetes.io/name: {{ include "fletch.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "fletch.labels" -}}
{{ include "fletch.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* Metadata of an object. Arguments: root, component, name. Labels, annotations, namespace, and cluster
(for an object of no namespace) may be absent. */ -}}
{{- define "fletch.metadata" -}}
name: {{ .name }}
{{- if not .cluster }}
namespace: {{ default .root.Release.Namespace .namespace }}
{{- end }}
labels:
  {{- include "fletch.labels" . | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (default (dict) .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Reference of an image. Arguments: root, and the name of the image in the values. */ -}}
{{- define "fletch.image" -}}
{{- $image := index .root.Values.images .image -}}
{{- $registry := .root.Values.images.registry | trimSuffix "/" -}}
{{- $repository := $image.repository -}}
{{- if $registry }}{{ $repository = printf "%s/%s" $registry $repository }}{{ end -}}
{{- if .tag -}}
{{ printf "%s:%s" $repository .tag }}
{{- else if $image.digest -}}
{{ printf "%s@%s" $repository $image.digest }}
{{- else -}}
{{ printf "%s:%s" $repository (default .root.Chart.AppVersion $image.tag) }}
{{- end -}}
{{- end -}}

{{- define "fletch.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "fletch.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{- /* The files of the mount pods that exist while their domains are mounted, with commas. */ -}}
{{- define "fletch.readyFiles" -}}
{{- $files := list -}}
{{- range .Values.mounts.domains }}{{ $files = append $files (printf "/run/fletch-ready/%s" .name) }}{{ end -}}
{{ join "," $files }}
{{- end -}}

{{- /* Name of the chart's own PriorityClass, which other releases may not share. */ -}}
{{- define "fletch.ownPriorityClass" -}}
{{- $own := list (include "fletch.fullname" .) .Release.Namespace | compact | join "-" -}}
{{- default $own .Values.priorityClass.name -}}
{{- end -}}

{{- define "fletch.priorityClassName" -}}
{{- $own := include "fletch.ownPriorityClass" .root -}}
{{- default (ternary $own "" .root.Values.priorityClass.create) .of.priorityClassName -}}
{{- end -}}

{{- define "fletch.serverUrl" -}}
{{- $port := .Values.server.service.port -}}
{{- $host := printf "%s.%s.svc.%s" (include "fletch.fullname" .) .Release.Namespace .Values.clusterDomain -}}
{{ printf "%s://%s:%v" (ternary "https" "http" .Values.tls.enabled) $host $port }}
{{- end -}}

{{- /* URLs of etcd, as a list in JSON. */ -}}
{{- define "fletch.etcdUrls" -}}
{{- $full := include "fletch.fullname" . -}}
{{- $urls := .Values.cluster.etcd.endpoints -}}
{{- if .Values.cluster.etcd.deploy.enabled -}}
{{- range $i := until 3 -}}
{{- $urls = append $urls (printf "http://%s" (include "fletch.etcdHost" (dict "root" $ "number" $i "port" 2379))) -}}
{{- end -}}
{{- end -}}
{{ $urls | toRawJson }}
{{- end -}}

{{- /* Host and port of an etcd pod. Arguments: root, number, port. */ -}}
{{- define "fletch.etcdHost" -}}
{{- $pods := printf "%s-etcd" (include "fletch.fullname" .root) -}}
{{- $domain := printf "%s.svc.%s" .root.Release.Namespace .root.Values.clusterDomain -}}
{{ printf "%s-%d.%s.%s:%d" $pods .number $pods $domain .port }}
{{- end -}}

{{- /* What only members of a cluster mount. */ -}}
{{- define "fletch.clusterMounts" -}}
{{- with .Values.cluster }}
{{- if .enabled }}
- {name: peer-token, mountPath: /etc/fletch/peer, readOnly: true}
{{- if and .etcd.user .etcd.passwordSecret.name }}
- {name: etcd-password, mountPath: /etc/fletch/etcd-password, readOnly: true}
{{- end }}
{{- if .etcd.caSecret.name }}
- {name: etcd-ca, mountPath: /etc/fletch/etcd-ca, readOnly: true}
{{- end }}
{{- if .etcd.clientSecret }}
- {name: etcd-client, mountPath: /etc/fletch/etcd-client, readOnly: true}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "fletch.clusterVolumes" -}}
{{- with .Values.cluster }}
{{- if .enabled }}
- name: peer-token
  secret:
    secretName: {{ .peerTokenSecret.name }}
    defaultMode: 0440
    items:
      - {key: {{ .peerTokenSecret.key }}, path: token}
{{- if and .etcd.user .etcd.passwordSecret.name }}
- name: etcd-password
  secret:
    secretName: {{ .etcd.passwordSecret.name }}
    defaultMode: 0440
    items:
      - {key: {{ .etcd.passwordSecret.key }}, path: password}
{{- end }}
{{- if .etcd.caSecret.name }}
- name: etcd-ca
  secret:
    secretName: {{ .etcd.caSecret.name }}
    defaultMode: 0440
    items:
      - {key: {{ .etcd.caSecret.key }}, path: ca.crt}
{{- end }}
{{- if .etcd.clientSecret }}
- name: etcd-client
  secret:
    secretName: {{ .etcd.clientSecret }}
    defaultMode: 0440
    items:
      - {key: tls.crt, path: tls.crt}
      - {key: tls.key, path: tls.key}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "fletch.tlsSecret" -}}
{{ default (printf "%s-tls" (include "fletch.fullname" .)) .Values.tls.existingSecret }}
{{- end -}}

{{- define "fletch.clientSecret" -}}
{{ default (printf "%s-client-tls" (include "fletch.fullname" .)) .Values.tls.clientSecret }}
{{- end -}}

{{- /* What clients mount: the CA of the server, and a certificate of their own. */ -}}
{{- define "fletch.clientTlsMounts" -}}
{{- if and .Values.tls.enabled .Values.tls.caKey }}
- {name: server-ca, mountPath: /etc/fletch/server-ca, readOnly: true}
{{- end }}
{{- if and .Values.tls.enabled .Values.tls.clientCA.name }}
- {name: client-tls, mountPath: /etc/fletch/client-tls, readOnly: true}
{{- end }}
{{- end -}}

{{- /* Arguments: root, and the mode of the files. The key of the server stays out of these pods. */ -}}
{{- define "fletch.clientTlsVolumes" -}}
{{- $tls := .root.Values.tls -}}
{{- if and $tls.enabled $tls.caKey }}
- name: server-ca
  secret:
    secretName: {{ include "fletch.tlsSecret" .root }}
    defaultMode: {{ .mode }}
    items:
      - {key: {{ $tls.caKey }}, path: ca.crt}
{{- end }}
{{- if and $tls.enabled $tls.clientCA.name }}
- name: client-tls
  secret: {secretName: {{ include "fletch.clientSecret" .root }}, defaultMode: {{ .mode }}}
{{- end }}
{{- end -}}

{{- /* What the kubelet adds to a probe of the server. It sends no certificate, and checks none. */ -}}
{{- define "fletch.probeScheme" -}}
{{- if .Values.tls.enabled }}, scheme: HTTPS{{ end -}}
{{- end -}}

{{- /* Bytes that the cache may occupy: a part of the volume, never of the node's file system. */ -}}
{{- define "fletch.cacheBytes" -}}
{{- $size := .Values.server.cache.size | trimSuffix "B" -}}
{{- $number := regexFind "^[0-9]+" $size | int64 -}}
{{- $units := dict "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $unit := index $units (regexFind "[A-Za-z]+$" $size) | int64 -}}
{{- div (mul $number $unit (int64 .Values.server.cache.budgetPercent)) 100 -}}
{{- end -}}

{{- /* Bytes of version tables beside the cache: half of what its budget leaves, at most 8 GiB. */ -}}
{{- define "fletch.tablesBytes" -}}
{{- $budget := int64 .Values.server.cache.budgetPercent -}}
{{- $cache := include "fletch.cacheBytes" . | int64 -}}
{{- $half := div (mul $cache (sub 100 $budget)) (mul 2 $budget) -}}
{{- min $half 8589934592 -}}
{{- end -}}

{{- /* The volume of a domain. Its datasets are mounted at datasets/DOMAIN below it. */ -}}
{{- define "fletch.domainParent" -}}
{{ printf "%s/%s" (.root.Values.mounts.hostPath | trimSuffix "/") .domain }}
{{- end -}}

{{- /* The path that a claim's volume has on the nodes. It is a link that exists while the domain is mounted,
and it leads to the domain's parent. A volume of the type Directory keeps pods waiting without it. */ -}}
{{- define "fletch.readyLink" -}}
{{ printf "%s/.ready/%s" (.root.Values.mounts.hostPath | trimSuffix "/") .domain }}
{{- end -}}

{{- /* Claims: those of `mounts.namespaces`, and that of the test. The result is JSON: {claims: […]}. */ -}}
{{- define "fletch.claims" -}}
{{- $claims := list -}}
{{- range .Values.mounts.namespaces -}}
{{- $name := default "fletch-datasets" .claimName -}}
{{- $claims = append $claims (dict "namespace" .namespace "domain" .domain "name" $name) -}}
{{- end -}}
{{- if .Values.test.enabled -}}
{{- $name := printf "%s-test" (include "fletch.fullname" .) -}}
{{- $domain := .Values.test.domain -}}
{{- $claims = append $claims (dict "namespace" .Release.Namespace "domain" $domain "name" $name) -}}
{{- end -}}
{{ dict "claims" $claims | toJson }}
{{- end -}}

{{- define "fletch.domainNames" -}}
{{- $names := list -}}
{{- range .Values.mounts.domains }}{{ $names = append $names .name }}{{ end -}}
{{ dict "names" $names | toJson }}
{{- end -}}

{{- /* Checks between values that a JSON schema cannot express. */ -}}
{{- define "fletch.check" -}}
{{- $cluster := .Values.cluster -}}
{{- $etcd := $cluster.etcd -}}
{{- if and (gt (int .Values.server.replicas) 1) (not $cluster.enabled) -}}
{{- fail "server.replicas is more than 1: set cluster.enabled, and give the servers an etcd" -}}
{{- end -}}
{{- if and $cluster.enabled (not $etcd.endpoints) (not $etcd.deploy.enabled) -}}
{{- fail "cluster.enabled: name an etcd in cluster.etcd.endpoints, or set cluster.etcd.deploy.enabled" -}}
{{- end -}}
{{- if and $etcd.endpoints $etcd.deploy.enabled -}}
{{- fail "cluster.etcd.endpoints and cluster.etcd.deploy.enabled: set one of the two" -}}
{{- end -}}
{{- if and $etcd.deploy.enabled (not $cluster.enabled) -}}
{{- fail "cluster.etcd.deploy.enabled needs cluster.enabled: enable the cluster, or run no etcd" -}}
{{- end -}}
{{- if and $cluster.enabled (not .Values.tls.enabled) (not $cluster.insecurePeers) -}}
{{- fail "cluster.enabled without tls.enabled: enable TLS, or set cluster.insecurePeers on a trusted network" -}}
{{- end -}}
{{- if and $cluster.enabled .Values.tls.enabled (eq .Values.server.kind "DaemonSet") -}}
{{- fail "cluster.enabled with tls.enabled: a DaemonSet has no names for certificates; use a StatefulSet" -}}
{{- end -}}
{{- if and $etcd.user (not $etcd.passwordSecret.name) -}}
{{- fail "cluster.etcd.user: name the Secret of its password in cluster.etcd.passwordSecret.name" -}}
{{- end -}}
{{- $names := (include "fletch.domainNames" . | fromJson).names -}}
{{- if ne (len $names) (len (uniq $names)) -}}
{{- fail "mounts.domains names a domain twice: give each domain once" -}}
{{- end -}}
{{- range .Values.mounts.namespaces -}}
{{- if not $.Values.mounts.enabled -}}
{{- fail "mounts.namespaces needs mounts.enabled: enable the mounts, or remove the namespaces" -}}
{{- end -}}
{{- if not (has .domain $names) -}}
{{- fail (printf "mounts.namespaces: the domain %s is not in mounts.domains: add it there" .domain) -}}
{{- end -}}
{{- end -}}
{{- if .Values.test.enabled -}}
{{- if or (not .Values.mounts.enabled) (not (has .Values.test.domain $names)) -}}
{{- fail "test.domain is not mounted: add it to mounts.domains, and enable the mounts" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.server.s3.enabled (eq (int .Values.server.s3.port) (int .Values.server.service.port)) -}}
{{- fail "server.s3.port is that of server.service.port: give the S3 door a port of its own" -}}
{{- end -}}
{{- $tls := .Values.tls -}}
{{- if and $tls.enabled (not $tls.existingSecret) (not $tls.certManager.enabled) -}}
{{- fail "tls.enabled: name a Secret in tls.existingSecret, or set tls.certManager.enabled" -}}
{{- end -}}
{{- if and $tls.existingSecret $tls.certManager.enabled -}}
{{- fail "tls.existingSecret and tls.certManager.enabled: set one of the two" -}}
{{- end -}}
{{- if and $tls.certManager.enabled (not $tls.certManager.issuerRef.name) -}}
{{- fail "tls.certManager.issuerRef.name is empty: name the issuer" -}}
{{- end -}}
{{- if and $tls.clientCA.name (not $tls.enabled) -}}
{{- fail "tls.clientCA needs tls.enabled: enable TLS, or remove the client CA" -}}
{{- end -}}
{{- if and $tls.clientCA.name (not $tls.clientSecret) (not $tls.certManager.enabled) -}}
{{- fail "tls.clientCA: name the Secret of the mounts' certificate in tls.clientSecret" -}}
{{- end -}}
{{- if and .Values.monitoring.rules.enabled (not (.Files.Glob "rules/*.yaml")) -}}
{{- fail "monitoring.rules.enabled: this chart has no files in rules; set it to false" -}}
{{- end -}}
{{- if and .Values.monitoring.dashboards.enabled (not (.Files.Glob "dashboards/*.json")) -}}
{{- fail "monitoring.dashboards.enabled: this chart has no files in dashboards; set it to false" -}}
{{- end -}}
{{- end -}}

{{- /* The settings file of the server. Strings are written as in JSON, which TOML reads, too. */ -}}
{{- define "fletch.toml" -}}
{{- if not .Values.tls.enabled -}}
# No TLS: tokens and data cross the network unencrypted. Trusted networks only.
{{ end -}}
listen = "0.0.0.0:{{ .Values.server.service.port }}"
socket = "none"

[auth]
tokens = {{ printf "/etc/fletch/auth/%s" .Values.auth.tokensSecret.key | toRawJson }}
{{- if .Values.tls.enabled }}

[tls]
cert_file = "/etc/fletch/tls/tls.crt"
key_file = "/etc/fletch/tls/tls.key"
{{- with .Values.tls.clientCA }}
{{- if .name }}
client_ca_file = {{ printf "/etc/fletch/client-ca/%s" .key | toRawJson }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.server.s3 }}
{{- if .enabled }}

[s3]
listen = "0.0.0.0:{{ .port }}"
bucket = {{ .bucket | toRawJson }}
key_file = {{ printf "/etc/fletch/s3/%s" .keySecret.key | toRawJson }}
{{- end }}
{{- end }}
{{- with .Values.cluster }}
{{- if .enabled }}

[cluster]
coordinator = "etcd"
name = {{ default (printf "%s.%s" $.Release.Namespace (include "fletch.fullname" $)) .name | toRawJson }}
endpoints = {{ include "fletch.etcdUrls" $ }}
forget_after = {{ .forgetAfter | toRawJson }}
peer_token_file = "/etc/fletch/peer/token"
{{- if not $.Values.tls.enabled }}
insecure_peers = true
{{- end }}
{{- if and $.Values.tls.enabled $.Values.tls.caKey }}
peer_ca_file = "/etc/fletch/server-ca/ca.crt"
{{- end }}
{{- if and $.Values.tls.enabled $.Values.tls.clientCA.name }}
peer_cert_file = "/etc/fletch/client-tls/tls.crt"
peer_key_file = "/etc/fletch/client-tls/tls.key"
{{- end }}
{{- with .etcd.user }}
user = {{ . | toRawJson }}
password_file = "/etc/fletch/etcd-password/password"
{{- end }}
{{- if .etcd.caSecret.name }}
ca_file = "/etc/fletch/etcd-ca/ca.crt"
{{- end }}
{{- if .etcd.clientSecret }}
cert_file = "/etc/fletch/etcd-client/tls.crt"
key_file = "/etc/fletch/etcd-client/tls.key"
{{- end }}
{{- end }}
{{- end }}

[state]
dir = "/var/lib/fletch"

[cache]
dir = "/var/cache/fletch"
# {{ .Values.server.cache.budgetPercent }} % of the volume of {{ .Values.server.cache.size | trimSuffix "B" }}.
size = {{ include "fletch.cacheBytes" . }}
policy = {{ .Values.server.cache.policy | toRawJson }}
free_floor = {{ .Values.server.cache.freeFloor | toRawJson }}
short_circuit = {{ .Values.server.cache.shortCircuit | toRawJson }}

[tables]
# Half of what the budget leaves of that volume.
disk = {{ include "fletch.tablesBytes" . }}
{{- with .Values.server.memory.max }}

[memory]
max = {{ . | toRawJson }}
{{- end }}

[log]
format = {{ .Values.server.logFormat | toRawJson }}
{{- with .Values.server.publishUri }}

[publish]
uri = {{ . | toRawJson }}
{{- end }}
{{- $dirs := list }}
{{- range .Values.server.datasetVolumes }}
{{- $dirs = append $dirs (printf "%s=%s" .mountPath (join "," .domains)) }}
{{- end }}
{{- if .Values.test.enabled }}
{{- $dirs = append $dirs (printf "/srv/fletch-test=%s" .Values.test.domain) }}
{{- end }}
{{- if $dirs }}

[local]
dirs = {{ $dirs | toRawJson }}
{{- end }}
{{- range $i, $o := .Values.server.origins }}

[[origin]]
prefix = {{ $o.prefix | toRawJson }}
domains = {{ $o.domains | toRawJson }}
{{- range $key := list "endpoint" "region" "account" "credentials" "proxy" "concurrency"
    "requestsPerSecond" "bytesPerSecond" "allowHttp" "allowLinkLocal" }}
{{- if hasKey $o $key }}
{{ snakecase $key }} = {{ index $o $key | toRawJson }}
{{- end }}
{{- end }}
{{- with $o.credentialsSecret }}
credentials = { file = {{ printf "/etc/fletch/origins/%d/%s" $i .key | toRawJson }} }
{{- end }}
{{- end }}
{{- with .Values.server.extraConfig }}

{{ . | trim }}
{{- end }}
{{- end -}}
