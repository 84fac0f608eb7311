"""What the pods may do, what they mount, and what reaches them."""

import json
import re
import tomllib
import unittest

from rendering import (
    CHART, CI, NAMESPACE, REPO, containers, one, pod_specs, render, rendered, server_spec, settings, title,
    values,
)

# Volumes that Pod Security *restricted* allows.
RESTRICTED_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected",
    "secret",
}


# Sysctls that Pod Security allows, and types of SELinux.
SAFE_SYSCTLS = {
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
}
SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}


def of_context(name, context):
    """Returns what *restricted* forbids in one security context, of a pod or of a container."""
    out = []
    if context.get("runAsNonRoot") is False:
        out.append(f"{name} may run as root")
    if context.get("runAsUser") == 0:
        out.append(f"{name} runs as root")
    if context.get("seccompProfile", {}).get("type") == "Unconfined":
        out.append(f"{name} has no seccomp profile")
    if context.get("appArmorProfile", {}).get("type", "RuntimeDefault") == "Unconfined":
        out.append(f"{name} has no AppArmor profile")
    if (context.get("windowsOptions") or {}).get("hostProcess"):
        out.append(f"{name} is a process of the host")
    selinux = context.get("seLinuxOptions", {})
    if selinux.get("type", "") not in SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
        out.append(f"{name} has its own SELinux labels")
    return out


def hosts_of(container):
    """Returns the hosts that probes and hooks of a container ask in place of the pod."""
    lifecycle = container.get("lifecycle", {})
    handlers = [container.get(probe, {}) for probe in ("livenessProbe", "readinessProbe", "startupProbe")]
    handlers += [lifecycle.get(hook, {}) for hook in ("postStart", "preStop")]
    asked = [handler.get(kind, {}).get("host") for handler in handlers for kind in ("httpGet", "tcpSocket")]
    return [host for host in asked if host]


def unrestricted(spec):
    """Returns what Pod Security *restricted* forbids in a pod, by every rule of Kubernetes 1.34.

    https://kubernetes.io/docs/concepts/security/pod-security-standards/
    """
    out = [f"{key} is set" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    for volume in spec.get("volumes", []):
        out += [f"volume {kind}" for kind in volume if kind not in RESTRICTED_VOLUMES | {"name"}]
    pod = spec.get("securityContext", {})
    out += of_context("the pod", pod)
    out += [f"sysctl {s['name']}" for s in pod.get("sysctls", []) if s["name"] not in SAFE_SYSCTLS]
    for container in containers(spec) + spec.get("ephemeralContainers", []):
        name, own = container["name"], container.get("securityContext", {})
        out += of_context(name, own)
        if own.get("privileged"):
            out.append(f"{name} is privileged")
        if own.get("allowPrivilegeEscalation") is not False:
            out.append(f"{name} may escalate privileges")
        if not own.get("runAsNonRoot", pod.get("runAsNonRoot")):
            out.append(f"{name} may run as root")
        capabilities = own.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", []):
            out.append(f"{name} keeps capabilities")
        if set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
            out.append(f"{name} adds capabilities")
        profile = own.get("seccompProfile", pod.get("seccompProfile", {})).get("type")
        if profile not in ("RuntimeDefault", "Localhost"):
            out.append(f"{name} has no seccomp profile")
        if own.get("procMount", "Default") != "Default":
            out.append(f"{name} sees all of /proc")
        if any(port.get("hostPort") for port in container.get("ports", [])):
            out.append(f"{name} has a host port")
        out += [f"{name} asks the host {host}" for host in hosts_of(container)]
    return out


def ci(name):
    return rendered(CHART / "ci" / f"{name}-values.yaml")


class Cluster(unittest.TestCase):
    def test_servers_know_their_names_and_each_other(self):
        objects = ci("cluster")
        of = tomllib.loads(settings(objects))["cluster"]
        pods = [f"http://fletch-etcd-{i}.fletch-etcd.fletch.svc.cluster.local:2379" for i in range(3)]
        self.assertEqual(of["endpoints"], pods)
        self.assertEqual((of["coordinator"], of["name"]), ("etcd", "fletch.fletch"))
        self.assertNotIn("insecure_peers", of)
        spec = server_spec(objects)
        server = spec["containers"][0]
        env = {e["name"]: e.get("value", e.get("valueFrom")) for e in server["env"]}
        self.assertEqual(env["POD_NAME"], {"fieldRef": {"fieldPath": "metadata.name"}})
        self.assertEqual(env["FLETCH_CLUSTER_ID"], "$(POD_NAME)")
        host = "$(POD_NAME).fletch-headless.fletch.svc.cluster.local"
        self.assertEqual(env["FLETCH_CLUSTER_ADVERTISE_URL"], f"https://{host}:7380")
        names = one(objects, "Certificate", "fletch-tls")["spec"]["dnsNames"]
        self.assertIn(host.replace("$(POD_NAME)", "*"), names)
        self.assertEqual(one(objects, "StatefulSet", "fletch-server")["spec"]["replicas"], 3)
        # Every file that the settings name is mounted.
        mounted = {m["mountPath"] for m in server["volumeMounts"]}
        files = [v for k, v in of.items() if k.endswith("_file")]
        self.assertEqual(len(files), 4, files)
        for file in files:
            self.assertIn(file.rsplit("/", 1)[0], mounted)
        volumes = {v["name"] for v in spec["volumes"]} | {"state", "cache"}
        self.assertLessEqual({m["name"] for m in server["volumeMounts"]}, volumes)

    def test_etcd_takes_connections_of_servers_only(self):
        policy = one(ci("cluster"), "NetworkPolicy", "fletch-etcd")["spec"]["ingress"]
        who = [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
               for rule in policy for peer in rule["from"]]
        self.assertEqual((who, policy[0]["ports"][0]["port"]), (["server", "etcd"], "client"))

    def test_an_existing_etcd_and_a_trusted_network(self):
        objects, _ = render({
            "server": {"replicas": 2, "cache": {"storage": "hostPath"}, "state": {"existingClaim": "c"}},
            "cluster": {"enabled": True, "name": "prod", "insecurePeers": True, "etcd": {
                "endpoints": ["https://a:2379", "https://b:2379"], "user": "fletch",
                "passwordSecret": {"name": "p"}, "caSecret": {"name": "ca"}, "clientSecret": "c"}},
        })
        of = tomllib.loads(settings(objects))["cluster"]
        self.assertEqual((of["endpoints"], of["name"], of["user"], of["insecure_peers"]),
                         (["https://a:2379", "https://b:2379"], "prod", "fletch", True))
        spec = server_spec(objects)
        mounts = {m["name"]: m for m in spec["containers"][0]["volumeMounts"]}
        for key in ("password_file", "ca_file", "cert_file", "key_file"):
            self.assertIn(of[key].rsplit("/", 1)[0], [m["mountPath"] for m in mounts.values()], key)
        self.assertEqual(mounts["state"]["subPathExpr"], "$(POD_NAME)")
        apart = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
        self.assertEqual(apart["topologyKey"], "kubernetes.io/hostname")
        self.assertFalse([o for o in objects if o["metadata"]["name"].endswith("-etcd")])

    def test_one_server_knows_nothing_of_a_cluster(self):
        objects = ci("default")
        self.assertNotIn("cluster", tomllib.loads(settings(objects)))
        env = [e["name"] for e in server_spec(objects)["containers"][0]["env"]]
        self.assertEqual(env, ["HOME"])


class Security(unittest.TestCase):
    def test_every_pod_but_mounts_is_restricted(self):
        seen = set()
        for path in CI:
            storage = values(path).get("server", {}).get("cache", {}).get("storage", "claim")
            for name, spec in pod_specs(rendered(path)):
                on_host = storage == "hostPath" and name.endswith("-server")
                if on_host or name.endswith(("-mounts", "-mount-keeper")):
                    continue
                self.assertEqual(unrestricted(spec), [], f"{path.name}: {name}")
                for container in containers(spec):
                    read_only = container["securityContext"]["readOnlyRootFilesystem"]
                    self.assertTrue(read_only, container["name"])
                seen.add((name, storage))
        server, etcd = "StatefulSet/fletch-server", "StatefulSet/fletch-etcd"
        expected = {(server, "claim"), (server, "emptyDir"), (etcd, "claim"), ("Pod/fletch-test", "claim")}
        self.assertLessEqual(expected, seen)

    def test_the_check_finds_each_offence(self):
        offences = unrestricted(server_spec(ci("daemonset")))
        self.assertIn("volume hostPath", offences)
        self.assertIn("own-cache runs as root", offences)
        mounts = one(ci("default"), "DaemonSet")["spec"]["template"]["spec"]
        self.assertIn("mount-default is privileged", unrestricted(mounts))
        for context in ({}, {"capabilities": {"drop": []}}, {"runAsUser": 0}):
            objects, _ = render({"server": {"podSecurityContext": {"seccompProfile": None}}})
            spec = server_spec(objects)
            spec["containers"][0]["securityContext"] = context
            self.assertGreaterEqual(len(unrestricted(spec)), 3)

    def test_the_check_knows_every_rule(self):
        spec = server_spec(ci("default"))
        self.assertEqual(unrestricted(spec), [])
        probe = {"httpGet": {"host": "169.254.169.254", "path": "/", "port": 80}}
        offences = [
            ({"hostNetwork": True}, {}, {}), ({"hostPID": True}, {}, {}), ({"hostIPC": True}, {}, {}),
            ({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}, {}, {}),
            ({"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}}, {}, {}),
            ({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, {}, {}),
            ({"securityContext": {"runAsUser": 0}}, {}, {}),
            ({}, {"privileged": True}, {}), ({}, {"allowPrivilegeEscalation": None}, {}),
            ({}, {"runAsNonRoot": False}, {}), ({}, {"runAsUser": 0}, {}),
            ({}, {"capabilities": {"drop": ["NET_RAW"]}}, {}),
            ({}, {"capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]}}, {}),
            ({}, {"seccompProfile": {"type": "Unconfined"}}, {}),
            ({}, {"appArmorProfile": {"type": "Unconfined"}}, {}),
            ({}, {"seLinuxOptions": {"type": "spc_t"}}, {}), ({}, {"seLinuxOptions": {"role": "r"}}, {}),
            ({}, {"windowsOptions": {"hostProcess": True}}, {}), ({}, {"procMount": "Unmasked"}, {}),
            ({}, {}, {"ports": [{"containerPort": 1, "hostPort": 1}]}),
            ({}, {}, {"livenessProbe": probe}), ({}, {}, {"lifecycle": {"preStop": probe}}),
        ]
        for of_pod, of_security, of_container in offences:
            changed = json.loads(json.dumps(spec))
            first = changed["containers"][0]
            first.setdefault("securityContext", {}).update(of_security)
            first.update(of_container)
            pod = of_pod.pop("securityContext", {})
            changed.setdefault("securityContext", {}).update(pod)
            changed.update(of_pod)
            self.assertTrue(unrestricted(changed), (of_pod, pod, of_security, of_container))

    def test_only_the_mounts_are_privileged(self):
        for path in CI:
            for name, spec in pod_specs(rendered(path)):
                for container in containers(spec):
                    privileged = container.get("securityContext", {}).get("privileged", False)
                    has_keeper = values(path).get("mounts", {}).get("keeper", {}).get("enabled", False)
                    suffix = "-mount-keeper" if has_keeper else "-mounts"
                    mounts = name.endswith(suffix) and container in spec["containers"]
                    self.assertEqual(privileged, mounts, f"{path.name}: {name}/{container['name']}")

    def test_with_a_keeper_the_mounts_have_no_privilege_and_no_capability(self):
        objects = ci("keeper")
        mounts = one(objects, "DaemonSet", "fletch-mounts")["spec"]["template"]["spec"]
        self.assertEqual(unrestricted(mounts)[0], "volume hostPath")
        for container in mounts["containers"]:
            context = container["securityContext"]
            self.assertEqual(context["capabilities"], {"drop": ["ALL"]})
            self.assertFalse(context["allowPrivilegeEscalation"])
            self.assertNotIn("privileged", context)

    def test_no_pod_has_a_token_of_the_api_but_mounts_that_label_their_node(self):
        for path in CI:
            labels = values(path).get("mounts", {}).get("nodeLabel", {}).get("enabled", False)
            for name, spec in pod_specs(rendered(path)):
                self.assertIs(spec["automountServiceAccountToken"], False, name)
                sources = [source for volume in spec.get("volumes", [])
                           for source in volume.get("projected", {}).get("sources", [])]
                has_token = any("serviceAccountToken" in source for source in sources)
                self.assertEqual(has_token, labels and name.endswith("-mounts"), f"{path.name}: {name}")

    def test_the_account_of_the_mounts_patches_nodes_and_nothing_else(self):
        objects = ci("keeper")
        account = one(objects, "ServiceAccount", "fletch-mounts")
        self.assertIs(account["automountServiceAccountToken"], False)
        role = one(objects, "ClusterRole", "fletch-fletch-node-label")
        self.assertEqual(role["rules"], [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["patch"]}])
        binding = one(objects, "ClusterRoleBinding")
        self.assertEqual(binding["roleRef"]["name"], role["metadata"]["name"])
        self.assertEqual(binding["subjects"], [
            {"kind": "ServiceAccount", "name": "fletch-mounts", "namespace": NAMESPACE},
        ])
        pod = one(objects, "DaemonSet", "fletch-mounts")["spec"]["template"]["spec"]
        self.assertEqual(pod["serviceAccountName"], "fletch-mounts")
        keeper = one(objects, "DaemonSet", "fletch-mount-keeper")["spec"]["template"]["spec"]
        self.assertNotIn("serviceAccountName", keeper)
        kinds = {o["kind"] for o in ci("default")}
        self.assertFalse(kinds & {"ClusterRole", "ClusterRoleBinding", "ValidatingAdmissionPolicy"}, kinds)

    def test_a_policy_holds_that_account_to_its_node_and_its_label(self):
        objects = ci("keeper")
        policy = one(objects, "ValidatingAdmissionPolicy")
        binding = one(objects, "ValidatingAdmissionPolicyBinding")["spec"]
        self.assertEqual(binding["policyName"], policy["metadata"]["name"])
        self.assertEqual(binding["validationActions"], ["Deny"])
        spec = policy["spec"]
        self.assertEqual(spec["failurePolicy"], "Fail")
        self.assertEqual([c["expression"] for c in spec["matchConditions"]], [
            "request.userInfo.username == 'system:serviceaccount:fletch:fletch-mounts'",
        ])
        without, _ = render({"mounts": {"nodeLabel": {"enabled": True, "admissionPolicy": False}}})
        self.assertNotIn("ValidatingAdmissionPolicy", {o["kind"] for o in without})

    def test_secrets_are_named_and_never_rendered(self):
        for path in CI:
            self.assertNotIn("Secret", {o["kind"] for o in rendered(path)})


class Server(unittest.TestCase):
    def test_settings_are_those_of_the_documents(self):
        operations = (REPO / "docs" / "OPERATIONS.md").read_text()
        origins = (REPO / "docs" / "ORIGINS.md").read_text()
        for path in CI:
            parsed = tomllib.loads(settings(rendered(path)))
            for origin in parsed.pop("origin", []):
                for key in origin:
                    self.assertIn(f"| `{key}` |", origins, path.name)
            for table, content in parsed.items():
                keys = [f"{table}.{key}" for key in content] if isinstance(content, dict) else [table]
                for key in keys:
                    self.assertIn(f"| `{key}` |", operations, path.name)

    def test_the_cache_stays_within_its_volume(self):
        for name, size, percent in (("default", 200, 90), ("emptydir", 50, 80), ("daemonset", 2048, 90)):
            cache = tomllib.loads(settings(ci(name)))["cache"]
            self.assertEqual(cache["size"], (size << 30) * percent // 100, name)
        volumes = {v["name"]: v for v in server_spec(ci("emptydir"))["volumes"]}
        self.assertEqual(volumes["cache"]["emptyDir"]["sizeLimit"], "50Gi")

    def test_state_lies_on_a_claim(self):
        for path in CI:
            objects = rendered(path)
            spec = server_spec(objects)
            of = [o for o in objects if o["kind"] == "StatefulSet"]
            claims = [c["metadata"]["name"] for o in of for c in o["spec"].get("volumeClaimTemplates", [])]
            volumes = {v["name"]: v for v in spec["volumes"]}
            self.assertTrue("state" in claims or "persistentVolumeClaim" in volumes["state"], path.name)
            self.assertFalse(set(claims) & set(volumes), "a claim and a volume of one name")
        server = server_spec(ci("daemonset"))["containers"][0]
        mount = next(m for m in server["volumeMounts"] if m["name"] == "state")
        self.assertEqual(mount["subPathExpr"], "$(NODE_NAME)")

    def test_every_mount_has_its_volume(self):
        for path in CI:
            for document in rendered(path):
                if document["kind"] not in ("StatefulSet", "DaemonSet", "Pod"):
                    continue
                spec = document["spec"]
                claims = spec.get("volumeClaimTemplates", [])
                spec = spec["template"]["spec"] if "template" in spec else spec
                names = [v["name"] for v in spec.get("volumes", [])] + [c["metadata"]["name"] for c in claims]
                self.assertEqual(len(names), len(set(names)), title(document))
                used = {m["name"] for c in containers(spec) for m in c.get("volumeMounts", [])}
                self.assertEqual(used, set(names), f"{path.name}: {title(document)}")

    def test_config_maps_of_pods_exist(self):
        for path in CI:
            maps = {o["metadata"]["name"] for o in rendered(path) if o["kind"] == "ConfigMap"}
            for name, spec in pod_specs(rendered(path)):
                for volume in spec.get("volumes", []):
                    if "configMap" in volume:
                        self.assertIn(volume["configMap"]["name"], maps, f"{path.name}: {name}")

    def test_probes_ask_paths_of_the_api(self):
        paths = json.loads((REPO / "docs" / "openapi.json").read_text())["paths"]
        server = server_spec(ci("default"))["containers"][0]
        probes = ("startupProbe", "readinessProbe", "livenessProbe")
        asked = [server[probe]["httpGet"]["path"] for probe in probes]
        self.assertEqual([p in paths for p in asked], [True] * 3, asked)
        self.assertNotEqual(asked[1], asked[2])
        objects, _ = render({"server": {"probes": {"startup": {"path": "/other"}}}})
        self.assertEqual(server_spec(objects)["containers"][0]["startupProbe"]["httpGet"]["path"], "/other")

    def test_a_server_drains_before_it_is_killed(self):
        for path in CI:
            spec = server_spec(rendered(path))
            waits = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
            # OPERATIONS.md: the programs end within 10 s of SIGTERM.
            self.assertGreaterEqual(spec["terminationGracePeriodSeconds"], waits + 10)

    def test_the_s3_door_has_its_port_and_its_key(self):
        everything = ci("everything")
        parsed = tomllib.loads(settings(everything))["s3"]
        self.assertEqual((parsed["listen"], parsed["bucket"]), ("0.0.0.0:9000", "data"))
        spec = server_spec(everything)
        mount = next(m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "s3-key")
        self.assertEqual(parsed["key_file"], f"{mount['mountPath']}/k")
        volume = next(v for v in spec["volumes"] if v["name"] == "s3-key")["secret"]
        self.assertEqual((volume["secretName"], volume["defaultMode"]), ("s3", 0o440))
        ports = {p["name"]: p["containerPort"] for p in spec["containers"][0]["ports"]}
        self.assertEqual(ports["s3"], 9000)
        services = [o for o in everything if o["kind"] == "Service"
                    and any(p["name"] == "s3" for p in o["spec"]["ports"])]
        self.assertEqual(len(services), 2)
        self.assertNotIn("s3", tomllib.loads(settings(ci("default"))))
        self.assertNotIn("s3-key", {v["name"] for v in server_spec(ci("default"))["volumes"]})

    def test_changed_settings_restart_the_server(self):
        def checksum(given):
            objects, _ = render(given)
            template = one(objects, "StatefulSet")["spec"]["template"]
            return template["metadata"]["annotations"]["checksum/config"]

        self.assertEqual(checksum({}), checksum({"server": {"podLabels": {"a": "b"}}}))
        self.assertNotEqual(checksum({}), checksum({"server": {"memory": {"max": "1GiB"}}}))

    def test_images(self):
        spec = server_spec(ci("everything"))
        self.assertEqual(
            spec["containers"][0]["image"], f"registry.example/team/fletch-server@sha256:{'a' * 64}"
        )
        mount = one(ci("everything"), "DaemonSet")["spec"]["template"]["spec"]["containers"][0]
        self.assertEqual(mount["image"], "registry.example/team/fletch-mount:1")
        version = re.search(r'^version = "(.*)"', (REPO / "Cargo.toml").read_text(), re.M).group(1)
        self.assertEqual(server_spec(ci("default"))["containers"][0]["image"], f"fletch-server:{version}")

    def test_services_policies_and_monitors_reach_their_pods(self):
        for path in CI:
            objects = rendered(path)
            labels = {}
            ports = {}
            for document in objects:
                if document["kind"] in ("StatefulSet", "DaemonSet"):
                    template = document["spec"]["template"]
                    kind = template["metadata"]["labels"]["app.kubernetes.io/component"]
                    labels[kind] = template["metadata"]["labels"]
                    ports[kind] = {p["name"]: p["containerPort"] for c in template["spec"]["containers"]
                                   for p in c.get("ports", [])}
                    selector = document["spec"]["selector"]["matchLabels"]
                    self.assertLessEqual(selector.items(), labels[kind].items())

            def reached(selector):
                return [kind for kind, has in labels.items() if selector.items() <= has.items()]

            for document in objects:
                spec = document.get("spec", {})
                name = f"{path.name}: {title(document)}"
                if document["kind"] == "Service":
                    kind = document["metadata"]["labels"]["app.kubernetes.io/component"]
                    self.assertEqual(reached(spec["selector"]), [kind], name)
                    self.assertIn(spec["ports"][0]["targetPort"], ports[kind])
                elif document["kind"] == "NetworkPolicy":
                    kind = document["metadata"]["labels"]["app.kubernetes.io/component"]
                    self.assertEqual(reached(spec["podSelector"]["matchLabels"]), [kind], name)
                elif document["kind"] == "PodDisruptionBudget":
                    kind = document["metadata"]["labels"]["app.kubernetes.io/component"]
                    self.assertEqual(reached(spec["selector"]["matchLabels"]), [kind], name)
                elif document["kind"] == "ServiceMonitor":
                    wanted = spec["selector"]["matchLabels"].items()
                    services = [o for o in objects
                                if o["kind"] == "Service" and wanted <= o["metadata"]["labels"].items()]
                    self.assertEqual(len(services), 1, name)
                    self.assertEqual(spec["endpoints"][0]["port"], services[0]["spec"]["ports"][0]["name"])
                elif document["kind"] == "PodMonitor":
                    self.assertEqual(reached(spec["selector"]["matchLabels"]), ["mounts"], name)
                    for endpoint in spec["podMetricsEndpoints"]:
                        self.assertIn(endpoint["port"], ports["mounts"], name)

    def test_a_stateful_set_is_governed_by_the_headless_service(self):
        for path in CI:
            for document in rendered(path):
                if document["kind"] == "StatefulSet":
                    service = one(rendered(path), "Service", document["spec"]["serviceName"])
                    self.assertEqual(service["spec"]["clusterIP"], "None")

    def test_what_users_add_reaches_the_server(self):
        spec = server_spec(ci("everything"))
        server = spec["containers"][0]
        self.assertIn({"name": "AWS_REGION", "value": "eu-central-1"}, server["env"])
        self.assertEqual(server["args"][-2:], ["--limits-jobs", "1000"])
        self.assertIn({"name": "extra", "mountPath": "/extra"}, server["volumeMounts"])
        self.assertEqual(spec["imagePullSecrets"], [{"name": "pull"}])
        self.assertEqual(spec["priorityClassName"], "data-first")
        self.assertEqual(spec["serviceAccountName"], "existing")
        self.assertIn("nodeAffinity", spec["affinity"])
        self.assertEqual(one(ci("everything"), "PriorityClass")["value"], 5000)
        origins = server_spec(ci("origins"))
        path = "/etc/fletch/origins/1"
        self.assertIn(path, [m["mountPath"] for m in origins["containers"][0]["volumeMounts"]])
        credentials = tomllib.loads(settings(ci("origins")))["origin"][1]["credentials"]
        self.assertEqual(credentials, {"file": f"{path}/credentials"})
        account = one(ci("origins"), "ServiceAccount")
        self.assertIn("eks.amazonaws.com/role-arn", account["metadata"]["annotations"])

    def test_notes_warn_and_have_three_commands(self):
        for path in CI:
            _, notes = render(values(path))
            encrypted = values(path).get("tls", {}).get("enabled", False)
            self.assertEqual("TRUSTED NETWORK ONLY" in notes, not encrypted, path.name)
            self.assertEqual(re.findall(r"^  (\d)\. ", notes, re.M), ["1", "2", "3"], path.name)


class Tls(unittest.TestCase):
    def test_probes_and_clients_use_tls(self):
        objects = ci("tls")
        server = server_spec(objects)["containers"][0]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            self.assertEqual(server[probe]["httpGet"]["scheme"], "HTTPS", probe)
            self.assertNotIn("scheme", server_spec(ci("default"))["containers"][0][probe]["httpGet"])
        files = tomllib.loads(settings(objects))["tls"]
        paths = {m["mountPath"] for m in server["volumeMounts"]}
        for file in files.values():
            self.assertIn(file.rsplit("/", 1)[0], paths)
        self.assertEqual(set(files), {"cert_file", "key_file", "client_ca_file"})
        for name, spec in pod_specs(objects):
            for container in spec["containers"]:
                if container["name"] == "server":
                    continue
                given = " ".join(container.get("args", [])) + json.dumps(container.get("env", []))
                self.assertIn("https://fletch.fletch.svc.cluster.local:7380", given, name)
                for file in ("server-ca/ca.crt", "client-tls/tls.crt", "client-tls/tls.key"):
                    self.assertIn(f"/etc/fletch/{file}", given, name)
        endpoint = one(objects, "ServiceMonitor")["spec"]["endpoints"][0]
        self.assertEqual(endpoint["scheme"], "https")
        self.assertEqual(endpoint["tlsConfig"]["ca"]["secret"], {"name": "fletch-tls", "key": "ca.crt"})

    def test_the_key_of_the_server_is_in_its_pod_only(self):
        for name, spec in pod_specs(ci("tls")):
            for volume in spec["volumes"]:
                secret = volume.get("secret", {})
                if secret.get("secretName") == "fletch-tls" and not name.endswith("-server"):
                    self.assertEqual([i["key"] for i in secret["items"]], ["ca.crt"], name)

    def test_certificates_name_the_service(self):
        made = {o["metadata"]["name"]: o["spec"] for o in ci("tls") if o["kind"] == "Certificate"}
        self.assertEqual(set(made), {"fletch-tls", "fletch-client-tls"})
        self.assertIn("fletch.fletch.svc.cluster.local", made["fletch-tls"]["dnsNames"])
        own = {"enabled": True, "existingSecret": "own", "caKey": ""}
        objects, _ = render({"tls": own})
        self.assertNotIn("Certificate", {o["kind"] for o in objects})
        volume = next(v for v in server_spec(objects)["volumes"] if v["name"] == "tls")
        self.assertEqual(volume["secret"]["secretName"], "own")
        mounts = one(objects, "DaemonSet")["spec"]["template"]["spec"]["containers"]
        self.assertNotIn("--ca-file", mounts[0]["args"])


class Mounts(unittest.TestCase):
    def test_each_domain_has_its_container_token_and_directory(self):
        spec = one(ci("domains"), "DaemonSet")["spec"]["template"]["spec"]
        self.assertEqual([c["name"] for c in spec["containers"]], ["mount-research", "mount-1"])
        seen = set()
        for container, domain in zip(spec["containers"], ("research", "Team_B"), strict=True):
            args = dict(zip(container["args"], container["args"][1:], strict=False))
            self.assertEqual(args["--datasets"], f"/run/fletch/{domain}/datasets/{domain}")
            self.assertEqual(args["--tags"], "release-*")
            self.assertEqual(args["--keep"], "2h")
            self.assertEqual(args["--server"], "http://fletch.fletch.svc.cluster.local:7380")
            port = container["ports"][0]["containerPort"]
            self.assertEqual(args["--metrics-listen"], f"0.0.0.0:{port}")
            token = args["--token-file"].rsplit("/", 1)[0]
            self.assertIn(token, [m["mountPath"] for m in container["volumeMounts"]])
            seen |= {token, args["--ready-file"], args["--metrics-listen"], args["--state-dir"]}
        self.assertEqual(len(seen), 8, "domains share a file or a port")

    def test_mounts_reach_the_host(self):
        for path in CI:
            for name, spec in pod_specs(rendered(path)):
                if not name.endswith(("-mounts", "-mount-keeper")):
                    continue
                volumes = {v["name"]: v for v in spec["volumes"]}
                for container in spec["containers"]:
                    mount = next(m for m in container["volumeMounts"] if m["name"] == "mounts")
                    mounts_by_itself = container["securityContext"].get("privileged", False)
                    propagation = "Bidirectional" if mounts_by_itself else "HostToContainer"
                    self.assertEqual(mount["mountPropagation"], propagation)
                    self.assertEqual(mount["mountPath"], volumes["mounts"]["hostPath"]["path"])
                    # A path that differs from the host's would break the link of the volume.
                    self.assertTrue(container["args"][1].startswith(mount["mountPath"] + "/"))

    def test_pods_are_replaced_only_by_hand(self):
        self.assertEqual(one(ci("default"), "DaemonSet")["spec"]["updateStrategy"], {"type": "OnDelete"})
        self.assertIn("nvidia.com/gpu", json.dumps(one(ci("default"), "DaemonSet")["spec"]))

    def test_with_a_keeper_the_mounts_roll_and_the_keeper_stays(self):
        objects = ci("keeper")
        mounts, keeper = (one(objects, "DaemonSet", f"fletch-{name}") for name in ("mounts", "mount-keeper"))
        self.assertEqual(mounts["spec"]["updateStrategy"], {"type": "RollingUpdate"})
        self.assertEqual(keeper["spec"]["updateStrategy"], {"type": "OnDelete"})
        mount, held = (of["spec"]["template"]["spec"]["containers"][0] for of in (mounts, keeper))
        self.assertTrue(held["image"].endswith(":0.1.0-keeper"))
        self.assertNotEqual(mount["image"], held["image"])
        args = mount["args"]
        self.assertEqual(args[args.index("--keeper") + 1], held["args"][held["args"].index("--hold") + 1])
        self.assertEqual(held["args"][-1], held["volumeMounts"][0]["mountPath"])
        # No Secret, no network of its own, and nothing of the mounts but their directory.
        self.assertEqual([v["name"] for v in keeper["spec"]["template"]["spec"]["volumes"]], ["mounts"])

    def test_each_mount_labels_its_node_when_all_domains_are_mounted(self):
        objects = ci("keeper")
        spec = one(objects, "DaemonSet", "fletch-mounts")["spec"]["template"]["spec"]
        account = next(v for v in spec["volumes"] if v["name"] == "account")["projected"]["sources"]
        files = [account[0]["serviceAccountToken"]["path"], account[1]["configMap"]["items"][0]["path"]]
        self.assertEqual(files, ["token", "ca.crt"])
        ready = [c["args"][c["args"].index("--ready-file") + 1] for c in spec["containers"]]
        self.assertEqual(len(set(ready)), 2)
        for container in spec["containers"]:
            args = container["args"]
            self.assertEqual(args[args.index("--label-node") + 1], "$(NODE_NAME)")
            self.assertEqual(args[args.index("--label-when") + 1].split(","), ready)
            self.assertEqual(container["env"][0], {
                "name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}},
            })
            mounted = next(m for m in container["volumeMounts"] if m["name"] == "account")
            self.assertEqual(mounted["mountPath"], "/var/run/secrets/kubernetes.io/serviceaccount")
        self.assertNotIn("--label-node", json.dumps(ci("default")))

    def test_no_job_takes_the_room_of_a_mount_and_no_taint_ends_it(self):
        objects = ci("keeper")
        own = one(objects, "PriorityClass")
        self.assertEqual((own["metadata"]["name"], own["preemptionPolicy"]), ("fletch-fletch", "Never"))
        self.assertGreater(own["value"], 0)
        for name in ("fletch-mounts", "fletch-mount-keeper"):
            spec = one(objects, "DaemonSet", name)["spec"]["template"]["spec"]
            self.assertEqual(spec["priorityClassName"], "fletch-fletch")
            self.assertIn({"operator": "Exists", "effect": "NoExecute"}, spec["tolerations"])
        without, _ = render({"priorityClass": {"create": False}})
        self.assertNotIn("priorityClassName", json.dumps(without))

    def test_volumes_and_claims_are_pairs(self):
        pairs = 0
        for path in CI:
            objects = rendered(path)
            volumes = [o for o in objects if o["kind"] == "PersistentVolume"]
            claims = [o for o in objects if o["kind"] == "PersistentVolumeClaim"]
            given = values(path)
            wanted = len(given.get("mounts", {}).get("namespaces", []))
            wanted += bool(given.get("test", {}).get("enabled"))
            self.assertEqual((len(volumes), len(claims)), (wanted, wanted), path.name)
            for volume in volumes:
                reference = volume["spec"]["claimRef"]
                claim = next(c for c in claims if (c["metadata"]["namespace"], c["metadata"]["name"])
                             == (reference["namespace"], reference["name"]))
                self.assertEqual(claim["spec"]["volumeName"], volume["metadata"]["name"])
                for key in ("accessModes", "storageClassName"):
                    self.assertEqual(claim["spec"][key], volume["spec"][key])
                self.assertEqual(
                    claim["spec"]["resources"]["requests"]["storage"], volume["spec"]["capacity"]["storage"]
                )
                # Without the directory a pod waits: none starts on an empty one.
                self.assertEqual(volume["spec"]["hostPath"]["type"], "Directory")
                pairs += 1
        self.assertGreater(pairs, 5)

    def test_a_namespace_gets_its_domain_only(self):
        where = {}
        for volume in ci("domains"):
            if volume["kind"] == "PersistentVolume":
                where[volume["spec"]["claimRef"]["namespace"]] = volume["spec"]["hostPath"]["path"]
        self.assertEqual(where, {
            "research-1": "/run/fletch/.ready/research",
            "research-2": "/run/fletch/.ready/research",
            "team-b": "/run/fletch/.ready/Team_B",
        })

    def test_volumes_follow_the_nodes_of_the_mounts(self):
        volume = one(ci("daemonset"), "PersistentVolume")
        terms = volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"][0]["matchExpressions"]
        self.assertEqual(terms, [{"key": "nvidia.com/gpu.present", "operator": "In", "values": ["true"]}])

    def test_the_policy_lets_readers_in_and_nobody_else(self):
        policy = one(ci("domains"), "NetworkPolicy", "fletch-server")
        peers = json.dumps(policy["spec"]["ingress"][0]["from"])
        for name in ("research-1", "research-2", "team-b", "monitoring", "notebooks"):
            self.assertIn(name, peers)
        self.assertNotIn("{}", peers, "an empty selector lets everybody in")
        mounts = one(ci("domains"), "NetworkPolicy", "fletch-mounts")
        self.assertNotIn("team-b", json.dumps(mounts["spec"]))
        closed, _ = render({"networkPolicy": {"enabled": True}})
        self.assertEqual(one(closed, "NetworkPolicy", "fletch-mounts")["spec"]["ingress"], [])

    def test_the_keeper_has_no_network(self):
        policy = one(ci("keeper"), "NetworkPolicy", "fletch-mount-keeper")["spec"]
        self.assertEqual(policy["policyTypes"], ["Ingress", "Egress"])
        self.assertEqual((policy["ingress"], policy["egress"]), ([], []))
        keeper = one(ci("keeper"), "DaemonSet", "fletch-mount-keeper")["spec"]["template"]
        selector = policy["podSelector"]["matchLabels"]
        self.assertLessEqual(selector.items(), keeper["metadata"]["labels"].items())
        without, _ = render({})
        self.assertNotIn("mount-keeper", json.dumps(without))

    def test_helm_test_reads_as_an_ordinary_user(self):
        pod = one(ci("test"), "Pod")
        self.assertEqual(pod["metadata"]["annotations"]["helm.sh/hook"], "test")
        self.assertEqual(pod["metadata"]["namespace"], NAMESPACE)
        claim = next(v for v in pod["spec"]["volumes"] if v["name"] == "datasets")["persistentVolumeClaim"]
        one(ci("test"), "PersistentVolumeClaim", claim["claimName"])
        dirs = tomllib.loads(settings(ci("test")))["local"]["dirs"]
        self.assertEqual(dirs, ["/srv/fletch-test=default"])
        writes = next(c for c in server_spec(ci("test"))["initContainers"] if c["name"] == "test-data")
        self.assertIn("/srv/fletch-test", [m["mountPath"] for m in writes["volumeMounts"]])
        self.assertNotIn("initContainers", server_spec(ci("default")))


if __name__ == "__main__":
    unittest.main()
