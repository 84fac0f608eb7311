use super::*;

fn user() -> Environment {
    Environment { home: Some("/home/u".into()), ..Environment::default() }
}

fn config(args: &[&str], environment: &Environment) -> Result<Config, ConfigError> {
    let args: Vec<&str> = std::iter::once("fletch-server").chain(args.iter().copied()).collect();
    match read(args, environment)? {
        Action::Serve(c) | Action::Check(c) | Action::Show(c) => Ok(*c),
        Action::NewToken(_) => panic!("makes a token"),
    }
}

fn port(c: &Config) -> u16 {
    c.listen.expect("an address").port()
}

fn faults(args: &[&str]) -> String {
    config(args, &user()).expect_err("faulty").to_string()
}

fn value<'a>(c: &'a Config, key: &str) -> (&'a str, String) {
    let e = c.effective.iter().find(|e| e.key == key).expect("known key");
    (&e.value, e.source.to_string())
}

#[test]
fn defaults_follow_xdg_as_a_user_and_the_fhs_as_root() {
    let c = config(&[], &user()).expect("defaults are valid");
    assert_eq!(c.cache.dir, Path::new("/home/u/.cache/fletch"));
    assert_eq!(c.state_dir, Path::new("/home/u/.local/state/fletch"));
    assert_eq!(c.socket.as_deref(), Some(Path::new("/home/u/.local/state/fletch/server.sock")));
    assert_eq!((port(&c), c.limits.memory_bytes), (7380, 2 << 30));
    assert_eq!((c.cache.size, c.cache.free_floor), (Amount::Percent(50), Amount::Percent(5)));
    assert_eq!(c.cache.policy, Policy::Fletch);
    let xdg = Environment {
        cache_home: Some("/c".into()),
        state_home: Some("/s".into()),
        runtime_dir: Some("/run/user/7".into()),
        memory_limit: Some(512 << 20),
        ..user()
    };
    let c = config(&[], &xdg).expect("valid");
    assert_eq!(
        (c.cache.dir.as_path(), c.state_dir.as_path()),
        (Path::new("/c/fletch"), Path::new("/s/fletch"))
    );
    assert_eq!(c.socket.as_deref(), Some(Path::new("/run/user/7/fletch/server.sock")));
    assert_eq!(c.limits.memory_bytes, 256 << 20);
    let c = config(&[], &Environment { root: true, ..user() }).expect("valid");
    assert_eq!(
        (c.cache.dir.as_path(), c.state_dir.as_path()),
        (Path::new("/var/cache/fletch"), Path::new("/var/lib/fletch"))
    );
    assert_eq!(c.socket.as_deref(), Some(Path::new("/run/fletch/server.sock")));
}

#[test]
fn a_flag_beats_the_file_and_the_file_beats_the_default() {
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("fletch.toml");
    std::fs::write(
        &file,
        "listen = \"127.0.0.1:1\"\n[cache]\nsize = \"3GiB\"\nfree_floor = 4096\npolicy = \"pin\"\n\
         [memory]\nmax = \"1GiB\"\n\
         [io]\ntimeout = \"7s\"\n[limits]\nrequests = 9\n\
         [local]\ndirs = [\"/tmp\"]\n[[origin]]\n\
         prefix = \"s3://bucket\"\nendpoint = \"http://127.0.0.1:9\"\nallow_http = true\n",
    )
    .expect("write");
    let file = file.to_str().expect("utf-8");
    let c = config(&["--config", file, "--memory", "128MiB", "config", "show", "--effective"], &user())
        .expect("valid");
    assert_eq!((c.limits.memory_bytes, c.limits.requests, port(&c)), (128 << 20, 9, 1));
    assert_eq!(c.limits.io_timeout.as_secs(), 7);
    assert_eq!((c.cache.size, c.cache.free_floor), (Amount::Bytes(3 << 30), Amount::Bytes(4096)));
    assert_eq!(c.cache.policy, Policy::Pin);
    assert_eq!(c.origins[0].prefix, "s3://bucket");
    assert_eq!(value(&c, "memory.max"), ("128MiB", "flag --memory".into()));
    assert_eq!(value(&c, "limits.requests"), ("9", format!("file {file}")));
    assert_eq!(value(&c, "tables.memory"), ("256MiB", "default".into()));
    let shown = c.show();
    for line in [
        "memory.max = \"128MiB\"",
        "limits.requests = 9",
        "local.dirs = [\"/tmp\"]",
        "# flag --memory",
        "# default",
        "[[origin]]",
        "s3://bucket",
    ] {
        assert!(shown.contains(line), "{line} in {shown}");
    }
}

#[test]
fn every_fault_is_told_at_once_with_its_fix() {
    let told = faults(&[
        "--listen",
        "0.0.0.0:7380",
        "--memory",
        "lots",
        "--log-format",
        "xml",
        "--local-dirs",
        "/no/such",
    ]);
    for part in [
        "listen (flag --listen): 0.0.0.0:7380 is not a loopback address",
        "write 127.0.0.1:7380",
        "memory.max (flag --memory): \"lots\" is not a size",
        "write text or json",
        "/no/such",
    ] {
        assert!(told.contains(part), "{part} in {told}");
    }
    assert!(faults(&["--memory", "1MiB"]).contains("at least 64MiB"));
    assert!(faults(&["--cache-size", "1MiB"]).contains("at least 16MiB, or 0"));
    assert!(faults(&["--cache-size", "101%", "--cache-policy", "mru"]).lines().count() == 2);
    assert!(faults(&["--limits-grace", "1m"]).contains("at most 8s"));
    assert!(faults(&["--limits-header-bytes", "1KiB", "--limits-jobs", "0"]).lines().count() == 2);
    assert!(faults(&["--cache-dir", "/x", "--state-dir", "/x"]).contains("a directory of its own"));
    assert!(faults(&["--socket", &format!("/{}", "x".repeat(110))]).contains("104 bytes"));
    assert!(faults(&["--listen", "nowhere"]).contains("IP:PORT"));
    assert!(faults(&["--tls-cert-file", "/c.pem"]).contains("set tls.key_file"));
    assert!(faults(&["--tls-key-file", "/k.pem"]).contains("set tls.cert_file"));
    assert!(faults(&["--tls-client-ca-file", "/ca.pem"]).contains("needs TLS"));
}

#[test]
fn only_with_tokens_others_may_ask() {
    assert!(faults(&["--listen", "[::]:1"]).contains("--auth-tokens"));
    let c = config(&["--listen", "0.0.0.0:1", "--auth-tokens", "/t.toml"], &user()).expect("valid");
    assert_eq!((port(&c), c.auth_tokens.as_deref()), (1, Some(Path::new("/t.toml"))));
}

#[test]
fn with_tokens_origins_and_directories_name_their_domains() {
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("fletch.toml");
    let file = file.to_str().expect("utf-8");
    let write = |domains: &str, dirs: &str| {
        let origin = format!("[[origin]]\nprefix = \"s3://bucket\"\n{domains}\n");
        std::fs::write(file, format!("[local]\ndirs = [{dirs}]\n{origin}")).expect("write");
    };
    let tokens = ["--config", file, "--auth-tokens", "/t.toml"];
    write("", "\"/tmp\", \"/usr=a,b\"");
    let told = faults(&tokens);
    for part in [
        "[[origin]] s3://bucket: with a tokens file",
        "below `prefix = \"s3://bucket\"` add the line `domains = [\"*\"]`",
        "/tmp must name the domains",
        "\"/tmp=*\"",
    ] {
        assert!(told.contains(part), "{part} in {told}");
    }
    assert!(!told.contains("/usr") && told.lines().count() == 2, "{told}");
    let c = config(&["--config", file], &user()).expect("without tokens nothing changes");
    assert_eq!((c.local_dirs[0].domains.len(), c.local_dirs[1].domains.len()), (0, 2));
    write("domains = [\"*\"]", "\"/tmp=*\"");
    let c = config(&tokens, &user()).expect("as it was told");
    assert_eq!(
        (c.origins[0].domains.as_slice(), c.local_dirs[0].domains.as_slice()),
        (&["*".into()][..], &["*".into()][..])
    );
    write("domains = [\"a b\"]", "");
    assert!(faults(&tokens).contains("\"a b\" is not the name of a domain"));
}

#[test]
fn a_server_may_listen_on_its_socket_only() {
    let c = config(&["--listen", "none"], &user()).expect("valid");
    assert!(c.listen.is_none() && c.socket.is_some());
    assert!(faults(&["--listen", "none", "--socket", "none"]).contains("has no door"));
    let told = faults(&["--auth-hosts", "http://x", "--auth-socket-admins", "root"]);
    assert!(told.contains("auth.hosts (flag --auth-hosts)") && told.lines().count() == 2, "{told}");
}

#[test]
fn idle_and_the_log_file_are_off_by_default_and_an_origin_has_three_quarters_of_the_calls() {
    let c = config(&[], &user()).expect("valid");
    assert_eq!((c.idle, c.log_file), (None, None));
    assert_eq!((c.limits.origin_requests, c.limits.origin_requests_per_origin), (88, 66));
    let c = config(&["--idle", "10m", "--log-file", "/l", "--limits-origin-requests", "1"], &user());
    let c = c.expect("valid");
    assert_eq!(c.idle, Some(std::time::Duration::from_secs(600)));
    assert_eq!(c.log_file.map(|f| (f.path, f.bytes_max)), Some(("/l".into(), 16 << 20)));
    assert_eq!(c.limits.origin_requests_per_origin, 1);
    let c = config(&["--limits-origin-requests-per-origin", "5"], &user()).expect("valid");
    assert_eq!(c.limits.origin_requests_per_origin, 5);
    for bad in ["0", "89", "0%"] {
        let told = faults(&["--limits-origin-requests-per-origin", bad]);
        assert!(told.contains("within 1 and limits.origin_requests"), "{bad}: {told}");
    }
    for bad in ["900ms", "2h"] {
        let told = faults(&["--cache-decision-interval", bad]);
        assert!(told.contains("within 1s and 1h"), "{bad}: {told}");
    }
    assert!(faults(&["--idle", "soon"]).contains("idle (flag --idle)"));
}

/// Returns a value of a setting that is not its default.
fn other_value(s: &Setting) -> String {
    let value = match s.key {
        "listen" | "s3.listen" => "127.0.0.2:7",
        "socket" => "/run/other \"1\"/s.sock",
        "cache.dir" => "/srv/cache",
        "publish.uri" => "/srv/tables",
        "log.file" => "/var/log/fletch.log",
        "cache.size" => "37%",
        "cache.policy" => "pin",
        "cache.decision_interval" => "5m",
        "cache.short_circuit" => "always",
        "auth.tokens" => "/etc/tokens.toml",
        "auth.hosts" => "gpu7,cache.example:80",
        "auth.socket_admins" => "1000,@27",
        "memory.max" => "1000000007",
        "memory.prefetch" => "5%",
        "log.format" => "json",
        "local.dirs" => "/tmp=a,b:/usr=*",
        "limits.grace" => "1s 500ms",
        "cluster.coordinator" => "etcd",
        "cluster.endpoints" => "https://etcd-0:2379,https://etcd-1:2379",
        "cluster.member_ttl" => "7s",
        "cluster.advertise_url" | "cluster.peer_url" => "https://gpu7:7380",
        _ => match s.value {
            "N" => "17",
            "SIZE" => "48MiB",
            "TIME" => "1h 3m",
            "SIZE|PERCENT" => "7%",
            "N|PERCENT" => "50%",
            "N|auto" => "17",
            "NAME" => "other-1",
            "TIME|off" => "1h",
            "FILE" => "/var/log/it's # \\ here",
            "DIR" => "/srv/it's # \\ here",
            "URI" => "file:///srv/tables",
            "true|false" => "true",
            "URL" => "http://prometheus.example:9090/p",
            value => panic!("{}: a value for {value}", s.key),
        },
    };
    if s.key == "limits.header_bytes" { "9KiB".to_owned() } else { value.to_owned() }
}

#[test]
fn what_is_shown_is_a_settings_file_with_the_same_settings() {
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("shown.toml");
    let origins = dir.path().join("origins.toml");
    std::fs::write(
        &origins,
        "[[origin]]\nprefix = \"s3://a\"\nendpoint = \"http://127.0.0.1:9\"\nregion = \"r\"\n\
         allow_http = true\nconcurrency = 3\nrequests_per_second = 4\nbytes_per_second = \"5MiB\"\n\
         domains = [\"a\"]\ncredentials = { file = \"/etc/keys\" }\n\
         [[origin]]\nprefix = \"az://b\"\naccount = \"c\"\n\
         credentials = \"chain\"\ndomains = [\"*\"]\n\
         [[origin]]\nprefix = \"/data\"\ndomains = [\"a\", \"b\"]\n",
    )
    .expect("write");
    let origins = origins.to_str().expect("utf-8");
    let others: Vec<String> = SETTINGS.iter().map(|s| format!("--{}={}", s.flag, other_value(s))).collect();
    let others: Vec<&str> =
        ["--config", origins].into_iter().chain(others.iter().map(String::as_str)).collect();
    let root = Environment { root: true, ..user() };
    let cases = [(vec![], user()), (vec![], root.clone()), (vec!["--listen=none"], user()), (others, user())];
    for (args, environment) in cases {
        let first = config(&args, &environment).expect("valid");
        let all_differ = args.len() > 2;
        for (s, e) in SETTINGS.iter().zip(&first.effective) {
            let (given, default) = (&e.value, (s.default)(&environment));
            assert!(!all_differ || *given != default, "{} is the default", s.key);
        }
        std::fs::write(&file, first.show()).expect("write");
        // Read in another environment, so that no default hides a setting that is not shown.
        let elsewhere = Environment { home: Some("/nowhere".into()), ..Environment::default() };
        let again = config(&["--config", file.to_str().expect("utf-8")], &elsewhere)
            .unwrap_or_else(|e| panic!("{e}\n{}", first.show()));
        for (a, b) in first.effective.iter().zip(&again.effective) {
            assert_eq!(b.source, SettingSource::File(file.clone()), "{}", a.key);
        }
        let what = |c: &Config| {
            let c = c.clone();
            format!("{:#?}", Config { effective: Vec::new(), ..c })
        };
        assert_eq!(what(&first), what(&again), "{}", first.show());
        assert_eq!(first.origins, again.origins);
        assert_eq!(again.show().lines().count(), first.show().lines().count());
    }
}

#[test]
fn an_unknown_key_is_named_with_file_line_and_nearest_key() {
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("f.toml");
    std::fs::write(&file, "[memory]\nmaxx = \"1GiB\"\n").expect("write");
    let told = faults(&["--config", file.to_str().expect("utf-8")]);
    assert!(told.contains("f.toml:2") && told.contains("memory.max"), "{told}");
    assert!(faults(&["--config", "/no/such.toml"]).contains("/no/such.toml"));
}

#[test]
fn settings_have_unique_keys_flags_and_variables() {
    let mut seen = std::collections::HashSet::new();
    for s in SETTINGS {
        assert!(
            seen.insert(s.key.to_owned()) && seen.insert(format!("--{}", s.flag)) && seen.insert(s.env())
        );
    }
    command().debug_assert();
}

#[test]
fn a_cluster_is_checked_as_a_whole() {
    let c = config(&[], &Environment { host: Some("gpu7".into()), ..user() }).expect("valid");
    assert_eq!((c.cluster.id.as_str(), &c.cluster.etcd), ("gpu7", &None));
    let c = config(&[], &Environment { host: Some("_".into()), ..user() }).expect("valid");
    assert_eq!(c.cluster.id.as_str(), "server");
    let etcd = ["--cluster-coordinator=etcd", "--cluster-endpoints=http://a:2379, http://b:2379"];
    let c = config(&etcd, &user()).expect("valid").cluster.etcd.expect("etcd");
    assert_eq!((c.endpoints.len(), c.weight, c.stale_max), (2, None, None));
    assert_eq!((c.member_ttl.as_secs(), c.forget_after.as_secs(), &*c.cluster), (10, 60, "default"));
    let told = faults(&[
        "--cluster-coordinator=etcd",
        "--cluster-endpoints=a:2379,http://b/x",
        "--cluster-name=a/b",
        "--cluster-id=",
        "--cluster-weight=much",
        "--cluster-member-ttl=1s",
        "--cluster-forget-after=0s",
        "--cluster-stale-max=3s",
        "--cluster-user=fletch",
        "--cluster-key-file=/k",
        "--cluster-advertise-url=gpu7",
    ]);
    for part in [
        "\"a:2379\" is no endpoint; write http://HOST:2379",
        "\"http://b/x\" is no endpoint",
        "cluster name \"a/b\"",
        "member name \"\"",
        "cluster.weight (flag --cluster-weight)",
        "within 2s and 1m",
        "within 1s and 1day",
        "cluster.user (flag --cluster-user): needs cluster.password_file",
        "cluster.key_file (flag --cluster-key-file): needs cluster.cert_file",
        "\"gpu7\" is no URL of a server",
    ] {
        assert!(told.contains(part), "{part} in {told}");
    }
    assert!(faults(&["--cluster-coordinator=zookeeper"]).contains("write embedded or etcd"));
    assert!(faults(&["--cluster-zone=a"]).contains("no effect with cluster.coordinator = embedded"));
    assert!(faults(&["--cluster-coordinator=etcd"]).contains("name every member of etcd"));
    let told = faults(&[&etcd[..], &["--listen=none", "--cluster-ca-file=/ca"]].concat());
    assert!(told.contains("needs a TCP address") && told.contains("needs https:// endpoints"), "{told}");
    let told = faults(&[&etcd[..], &["--listen=0.0.0.0:1", "--auth-tokens=/t"]].concat());
    assert!(told.contains("cluster.advertise_url") && told.contains("http://HOST:PORT"), "{told}");
    assert!(
        told.contains("cluster.peer_token_file") && told.contains("is needed with auth.tokens"),
        "{told}"
    );

    // A token in plain text leaves this machine only where the operator said so.
    let tokens = ["--auth-tokens=/t", "--cluster-peer-token-file=/p", "--cluster-advertise-url=http://a:1"];
    let plain = [&etcd[..], &tokens].concat();
    assert!(faults(&plain).contains("to http://a:1 in plain text"), "{}", faults(&plain));
    let c = config(&[&plain[..], &["--cluster-insecure-peers=true"]].concat(), &user()).expect("valid");
    assert!(c.cluster.etcd.expect("etcd").peers.allows_insecure);
    for safe in ["--cluster-peer-url=https://a:1", "--cluster-peer-url=http://127.0.0.1:1"] {
        assert!(config(&[&plain[..], &[safe]].concat(), &user()).is_ok(), "{safe}");
    }
    assert!(faults(&["--cluster-insecure-peers=maybe", etcd[0], etcd[1]]).contains("cluster.insecure_peers"));
    // What this server requires of clients, the others require of it.
    let tls = ["--tls-cert-file=/c", "--tls-key-file=/k", "--tls-client-ca-file=/ca", "--listen=127.0.0.1:1"];
    let told = faults(&[&etcd[..], &tls, &["--cluster-advertise-url=http://a:1"]].concat());
    assert!(told.contains("is needed with tls.client_ca_file"), "{told}");
    assert!(told.contains("cluster.advertise_url") && told.contains("but this server speaks TLS"), "{told}");
    let shown = ["--cluster-peer-cert-file=/c", "--cluster-peer-key-file=/k"];
    assert!(config(&[&etcd[..], &tls, &shown].concat(), &user()).is_ok());
    assert!(faults(&[&etcd[..], &shown[..1]].concat()).contains("needs cluster.peer_key_file"));

    let told = faults(&[&etcd[..], &["--memory=120MiB"]].concat());
    assert!(told.contains("at least 128MiB"), "{told}");
    assert!(config(&[&etcd[..], &["--memory=128MiB"]].concat(), &user()).is_ok());
}

#[test]
fn places_may_differ_between_servers_and_limits_may_not() {
    let of = |words: &[&str]| config(words, &user()).expect("valid").shared();
    let one = of(&["--listen=127.0.0.1:1", "--state-dir=/a", "--cache-size=1GiB"]);
    assert_eq!(one, of(&["--listen=127.0.0.1:2", "--state-dir=/b", "--cache-size=2GiB"]));
    let other = of(&["--limits-lease-ttl=7s", "--state-dir=/a"]);
    let differ: Vec<_> = one.iter().filter(|(key, hash)| other.get(*key) != Some(hash)).collect();
    assert_eq!(differ.len(), 1, "{differ:?}");
    assert_eq!(differ[0].0, "limits.lease_ttl");
    assert!(one.contains_key("origins") && one.contains_key("cluster.member_ttl"), "{one:?}");
}

#[test]
fn the_s3_door_is_off_and_needs_a_key_with_tokens() {
    let c = config(&["--s3-key-file", "/k"], &user()).expect("valid");
    assert_eq!(c.s3, None);
    let c = config(&["--s3-listen", "localhost:0", "--s3-bucket", "data-1"], &user()).expect("valid");
    let s3 = c.s3.expect("on");
    assert_eq!((s3.listen.port(), s3.bucket.as_str(), s3.key_file), (0, "data-1", None));
    let told = faults(&["--s3-listen", "0.0.0.0:7381"]);
    assert!(told.contains("s3.listen") && told.contains("not a loopback address"), "{told}");
    let told = faults(&["--s3-listen", "127.0.0.1:7381", "--auth-tokens", "/t"]);
    assert!(told.contains("--s3-key-file") && told.contains("head -c 32"), "{told}");
    let args = ["--s3-listen", "0.0.0.0:7381", "--auth-tokens", "/t", "--s3-key-file", "/k"];
    let c = config(&args, &user()).expect("valid");
    assert_eq!(c.s3.expect("on").key_file.as_deref(), Some(Path::new("/k")));
    for bad in ["ab", "Fletch", "a.b.c", "-abc", "abc-", "a_bc", &"a".repeat(64)] {
        assert!(faults(&[&format!("--s3-bucket={bad}")]).contains("s3.bucket"), "{bad}");
    }
}
