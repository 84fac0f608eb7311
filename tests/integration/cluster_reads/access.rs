//! What servers show each other: certificates, tokens, and the domain for which they ask.

use crate::common::{FILE, NEWS, Origin, get};
use fletch_core::Hash;
use fletch_testkit::tls::Authority;
use fletch_tests::bins::{command, run, stdout};
use fletch_tests::cluster::{ClientTls, ClusterServer, EtcdCluster, agreed};
use fletch_tests::readers::Data;
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

#[test]
fn servers_with_tls_show_each_other_their_certificates() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let origin = Origin::start(17, 36, None);
    let dir = TempDir::with_prefix("fletch-tls-").expect("dir");
    let (authority, foreign) = (Authority::new("servers"), Authority::new("others"));
    let (cert, key) = authority.server(&["127.0.0.1"], 4000).write(dir.path(), "server");
    let ca = dir.path().join("ca.pem");
    fs::write(&ca, authority.pem()).expect("a file");
    let client = |signer: &Authority, name: &str| {
        let (cert, key) = signer.client(name).write(dir.path(), name);
        ClientTls { ca: ca.clone(), cert, key }
    };
    let (peer, stranger) = (client(&authority, "peer"), client(&foreign, "stranger"));
    let server = |id: &str, shows: &ClientTls| {
        let flag = |name: &str, path: &Path| format!("--{name}={}", path.display());
        let words = [
            flag("config", Path::new(&origin.config)),
            flag("tls-cert-file", &cert),
            flag("tls-key-file", &key),
            flag("tls-client-ca-file", &ca),
            flag("cluster-peer-ca-file", &shows.ca),
            flag("cluster-peer-cert-file", &shows.cert),
            flag("cluster-peer-key-file", &shows.key),
            "--cache-free-floor=0".to_owned(),
        ];
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let mut server = ClusterServer::new(id, &etcd, &words).with_tls(&peer);
        server.start();
        server.register("set", &origin.emulator.uri(), &origin.tables, None);
        server
    };
    let (a, b) = (server("a", &peer), server("b", &peer));
    agreed(&[&a, &b], "a:up b:up", NEWS);
    let all_are_right = |server: &ClusterServer| {
        origin.data.files.iter().all(|(path, hash)| {
            server.file(&origin.root, path).is_some_and(|bytes| Hash::of(&bytes) == *hash)
        })
    };
    assert!(all_are_right(&a) && all_are_right(&b));
    let n = origin.data.files.len() as u64;
    assert_eq!(origin.reads(), (n, n), "one fetch a chunk");
    let received = a.sum("fletch_peer_received_bytes_total") + b.sum("fletch_peer_received_bytes_total");
    assert_eq!(received, origin.data.bytes() as f64, "each chunk went to the server that does not own it");
    // A server with a certificate of another CA reads, too, but not from the others. They name the reason.
    let c = server("c", &stranger);
    agreed(&[&a, &b, &c], "a:up b:up c:up", NEWS);
    assert!(all_are_right(&c));
    assert_eq!(c.sum("fletch_peer_received_bytes_total"), 0.0);
    assert!(c.log().contains("rejects the certificate of this client"), "{}", c.log());
}

fn made(dir: PathBuf) -> PathBuf {
    fs::create_dir_all(&dir).expect("mkdir");
    dir
}

fn token(home: &Path, file: &Path, name: &str, more: &[&str]) -> PathBuf {
    let mut c = command("fletch-server");
    c.args(["token", "new", "--append"]).arg(file).args(more);
    let at = home.join(format!("{name}.token"));
    fs::write(&at, stdout(&run(&mut c))).expect("token");
    at
}

#[test]
fn a_peer_reads_for_the_domain_that_it_names_and_nothing_else() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let home = TempDir::with_prefix("fletch-peers-").expect("home");
    let tokens = home.path().join("tokens.toml");
    let of_a = token(home.path(), &tokens, "a", &["--tenant", "a"]);
    let of_b = token(home.path(), &tokens, "b", &["--tenant", "b"]);
    let peer = token(home.path(), &tokens, "peer", &["--role", "peer"]);
    let data = Data::within(&made(home.path().join("data")), 13, 24, FILE);
    let tables = made(home.path().join("tables"));
    let root = fletch_tests::fixture::index(&data.dir, &tables, &[]);
    let dirs = format!("--local-dirs={}=*:{}=*", data.dir.display(), tables.display());
    let tokens = format!("--auth-tokens={}", tokens.display());
    let own = format!("--cluster-peer-token-file={}", peer.display());
    let servers = ["x", "y"].map(|id| {
        let mut server = ClusterServer::new(id, &etcd, &[&dirs, &tokens, &own]);
        server.start();
        server.register("d", &data.dir.display().to_string(), &tables.display().to_string(), Some(&of_a));
        server
    });
    let both = || servers.iter();
    until("both are members", Duration::from_secs(5), || {
        both().all(|s| {
            let (_, view) = get(&format!("{}/v1/cluster", s.url), &of_a, &[]);
            String::from_utf8_lossy(&view).matches("\"state\":\"up\"").count() == 2
        })
    });
    // Clients of the domain read through both servers, which ask each other.
    for (path, hash) in &data.files {
        for server in both() {
            let url = format!("{}/v1/versions/{root}/files/{path}", server.url);
            let (status, body) = get(&url, &of_a, &[]);
            assert!(status == "200" && Hash::of(&body) == *hash, "{status}");
            // Foreign and absent are one answer, whatever is cached.
            let (foreign, told) = get(&url, &of_b, &[]);
            let absent = url.replace(&root, &"0".repeat(64));
            assert_eq!((foreign, told), get(&absent, &of_b, &[]));
        }
    }
    let chunk = |root: &str| format!("/v1/peers/versions/{root}/chunks/{}", data.files[0].1);
    for server in both() {
        let at = |path: &str| format!("{}{path}", server.url);
        let ask = |token: &Path, path: &str, domain: &str| {
            get(&at(path), token, &[&format!("Fletch-Domain: {domain}"), "Fletch-View: 99999999"])
        };
        // A peer reads for the domain that it names.
        let (status, body) = ask(&peer, &chunk(&root), "a");
        assert!(status == "200" && Hash::of(&body) == data.files[0].1, "{status}");
        let foreign = ask(&peer, &chunk(&root), "b");
        let absent = ask(&peer, &chunk(&"0".repeat(64)), "b");
        assert_eq!((&*foreign.0, &foreign.1), ("404", &absent.1));
        assert_eq!(ask(&peer, &chunk(&root), "nobody"), foreign);
        assert_eq!(get(&at(&chunk(&root)), &peer, &[]).0, "400", "without a domain");
        // Clients are no peers, and peers are no clients.
        for client in [&of_a, &of_b] {
            let (status, told) = ask(client, &chunk(&root), "a");
            assert!(status == "403" && String::from_utf8_lossy(&told).contains("role"), "{status}");
        }
        let file = format!("/v1/versions/{root}/files/{}", data.files[0].0);
        for path in [&*file, "/v1/datasets", "/v1/cluster", "/v1/accounts", "/metrics", "/v1/jobs"] {
            assert_eq!(get(&at(path), &peer, &[]).0, "403", "{path}");
        }
    }
    // Unregistered: the same answer as absent, at once.
    let mut c = command("fletch");
    run(c.args(["unregister", "d", "--server", &servers[0].url, "--token-file"]).arg(&of_a));
    for server in both() {
        let ask = |root: &str| {
            let headers = ["Fletch-Domain: a", "Fletch-View: 99999999"];
            get(&format!("{}{}", server.url, chunk(root)), &peer, &headers)
        };
        assert_eq!((&*ask(&root).0, ask(&root)), ("404", ask(&"0".repeat(64))));
    }
}
