//! Several servers, a real etcd and one origin: who fetches which chunk, and what remains while parts are
//! gone.
//!
//! Every dataset is registered at each server.

mod access;
mod common;
mod lies;

use common::{FILE, NEWS, Origin, get};
use fletch_api::{Ack, OrderKind, PlanSpec, StartJob, Visitation, WorldSpec};
use fletch_client::epochs::Next;
use fletch_client::{Client, ClientConfig};
use fletch_core::cluster::{Member, Placement};
use fletch_core::plan::Tail;
use fletch_core::{Domain, Hash, StoreKey};
use fletch_tests::bins::{command, run, stdout};
use fletch_tests::cluster::{ClusterServer, EtcdCluster, agreed};
use fletch_tests::readers::{Data, Readers};
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Whether the tests run in their long form (`make accept-servers`).
fn is_full() -> bool {
    std::env::var("FLETCH_CLUSTER").is_ok()
}

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

fn key(hash: Hash) -> StoreKey {
    StoreKey { domain: Domain::default_domain(), hash }
}

fn urls<'a>(servers: &[&'a ClusterServer]) -> Vec<&'a str> {
    servers.iter().map(|s| &*s.url).collect()
}

/// Whether a server has a chunk in memory or on disk.
fn has(server: &ClusterServer, root: &str, hash: Hash) -> bool {
    let mut c = Command::new("curl");
    let url = format!("{}/v1/versions/{root}/chunks/{hash}", server.url);
    let head = run(c.args(["-sS", "-I", "--max-time", "10", &url])).stdout;
    String::from_utf8_lossy(&head).contains("fletch; hit")
}

#[test]
fn cold_readers_cost_one_fetch_a_chunk_and_a_lost_owner_fails_nobody() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let mut etcd = EtcdCluster::start(3);
    let origin = Origin::start(1, if is_full() { 2048 } else { 96 }, Some(Duration::from_millis(20)));
    // The long form reads 512 MiB, which the four disks hold together.
    let size = if is_full() { "--cache-size=256MiB" } else { "--cache-size=64MiB" };
    let [a, b, c, mut d] = NAMES.map(|id| origin.server(id, &etcd, &[size]));
    agreed(&[&a, &b, &c, &d], "a:up b:up c:up d:up", NEWS);
    let (readers, n) = (Readers::new(), origin.data.files.len() as u64);
    let got = readers.read_through(&urls(&[&a, &b, &c, &d]), &origin.root, &origin.shuffled(1, 8), 64);
    assert_eq!((got.failed, got.bytes), (0, 8 * origin.data.bytes()));
    assert_eq!(origin.reads(), (n, n), "one fetch a chunk");
    // Every chunk lies where it belongs, and nothing lies on a second disk.
    let on_disk = |s: &ClusterServer| s.metric("fletch_disk_chunks ").unwrap_or(0.0);
    until("all chunks are on their disks", Duration::from_secs(10), || {
        [&a, &b, &c, &d].into_iter().map(on_disk).sum::<f64>() >= n as f64
    });
    let placement = origin.placement(&a);
    let by_id = BTreeMap::from([("a", &a), ("b", &b), ("c", &c), ("d", &d)]);
    let mut owned: BTreeMap<&str, u64> = BTreeMap::new();
    for (path, hash) in &origin.data.files {
        let owner = placement.owner(&key(*hash)).expect("an owner").id.clone();
        let (id, server) = by_id.get_key_value(&*owner).expect("a member");
        assert!(has(server, &origin.root, *hash), "{path} is not at {id}");
        *owned.entry(id).or_default() += 1;
    }
    for (id, server) in &by_id {
        assert_eq!(on_disk(server), owned[id] as f64, "{id}: {owned:?}");
    }
    // I8: what readers got is counted once, where they are.
    let all = [&a, &b, &c, &d];
    let sum = |family: &str| all.iter().map(|s| s.sum(family)).sum::<f64>();
    assert_eq!(sum("fletch_bytes_total"), got.bytes as f64);
    assert_eq!(sum("fletch_peer_sent_bytes_total"), sum("fletch_peer_received_bytes_total"));
    let misses = all.map(|s| {
        let text = s.text("/metrics");
        let rows =
            text.lines().filter(|l| l.starts_with("fletch_bytes_total") && l.contains("result=\"miss\""));
        rows.filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>()
    });
    assert_eq!(misses.iter().sum::<f64>(), origin.data.bytes() as f64);
    assert_eq!(sum("fletch_peer_foreign_fills_total"), 0.0);
    let avoided = sum("fletch_avoided_bytes_total");
    let expected = got.bytes as f64 - sum("fletch_origin_read_bytes_total");
    assert!(
        (avoided / expected - 1.0).abs() < 0.01,
        "all servers together avoided {avoided}, not {expected}"
    );
    let (documents, served) =
        (fs::read_to_string("../docs/METRICS.md").expect("a document"), a.text("/metrics"));
    let documented =
        documents.lines().filter_map(|l| l.strip_prefix("| `fletch_peer_")?.split(['`', '{']).next());
    // `cluster_alarms` asks for refusals, which are absent while there are none.
    for name in documented.filter(|name| *name != "refusals_total") {
        assert!(
            served.contains(&format!("\n# TYPE fletch_peer_{name} ")),
            "{name} is documented and not served"
        );
    }

    // An owner is killed while readers of another dataset are cold.
    let (n, other) = (96, Origin::start(2, 96, Some(Duration::from_millis(20))));
    drop((a, b, c));
    d.end();
    let second = ["--cluster-name=second"];
    let [a, b, c, mut d] = NAMES.map(|id| other.server(&format!("{id}2"), &etcd, &second));
    agreed(&[&a, &b, &c, &d], "a2:up b2:up c2:up d2:up", NEWS);
    let placement = other.placement(&a);
    let alone = other.data.files.iter().filter(|(_, h)| placement.owner(&key(*h)).expect("one").id == "d2");
    let alone = alone.count() as u64;
    let got = std::thread::scope(|s| {
        let urls = urls(&[&a, &b, &c]);
        let (files, root) = (other.shuffled(3, 8), &*other.root);
        let reading = s.spawn(move || readers.read_through(&urls, root, &files, 64));
        until("a third is read", Duration::from_secs(30), || other.emulator.counts().get >= 32);
        d.kill();
        reading.join().expect("readers")
    });
    assert_eq!((got.failed, got.bytes), (0, 8 * other.data.bytes()));
    let (gets, objects) = other.reads();
    println!("origin: {gets} reads of {objects} objects; the killed server owned {alone}");
    assert!(gets * 100 <= n * 102 + alone * 100, "{gets} reads of {n} chunks, {alone} at the killed server");

    // Without a majority of etcd, reads go on by the last view.
    agreed(&[&a, &b, &c], "a2:up b2:up c2:up d2:down", Duration::from_secs(6));
    let leader = etcd.leader().expect("a leader");
    etcd.kill(leader);
    etcd.kill((leader + 1) % 3);
    let (readers, begun) = (Readers::new(), Instant::now());
    let is_soak = std::env::var("FLETCH_SOAK").is_ok();
    let outage = Duration::from_secs(if is_soak {
        300
    } else if is_full() {
        30
    } else {
        10
    });
    for seed in 4.. {
        let got = readers.read_through(&urls(&[&a, &b, &c]), &other.root, &other.shuffled(seed, 1), 16);
        assert_eq!((got.failed, got.bytes), (0, other.data.bytes()));
        if begun.elapsed() >= outage {
            break;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    let view = a.view_number();
    etcd.revive(leader);
    etcd.revive((leader + 1) % 3);
    let is_back = |s: &&ClusterServer| s.metric("fletch_cluster_coordinator_up ") == Some(1.0);
    until("all are in touch with etcd", Duration::from_secs(5), || [&a, &b, &c].iter().all(is_back));
    assert_eq!(agreed(&[&a, &b, &c], "a2:up b2:up c2:up d2:down", NEWS), view);
}

#[test]
fn disks_of_four_servers_hold_one_dataset() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    // 64 MiB. Each server owns 64 ± 7 of 256 chunks, and its disk has room for 69: a quarter and 8 %, beside
    // what a disk that small keeps free. What an owner has no room for is on another disk. In the long form
    // 2 GiB, each disk has room for a quarter and 10 %.
    let (files, size) =
        if is_full() { (8192, "--cache-size=576MiB") } else { (256, "--cache-size=20800KiB") };
    let origin = Origin::start(5, files, None);
    let mut servers = NAMES.map(|id| origin.server(id, &etcd, &[size]));
    let agree = |s: &[ClusterServer; 4]| {
        let all: Vec<_> = s.iter().collect();
        agreed(&all, "a:up b:up c:up d:up", NEWS)
    };
    let view = agree(&servers);
    let (readers, n) = (Readers::new(), origin.data.files.len() as u64);
    for epoch in 1..=3 {
        let all: Vec<_> = servers.iter().map(|s| &*s.url).collect();
        let got = readers.read_through(&all, &origin.root, &origin.shuffled(epoch, 1), 16);
        assert_eq!((got.failed, got.bytes), (0, origin.data.bytes()), "epoch {epoch}");
        let expected = if epoch == 1 { (n, n) } else { (0, 0) };
        assert_eq!(origin.reads(), expected, "epoch {epoch}");
        let on_disk = |s: &ClusterServer| s.metric("fletch_disk_chunks ").unwrap_or(0.0);
        let passed_on = |s: &ClusterServer| s.sum("fletch_peer_passed_on_chunks_total");
        until("all chunks are on disks", Duration::from_secs(30), || {
            servers.iter().map(on_disk).sum::<f64>() >= n as f64
        });
        let (disks, passed) = (servers.each_ref().map(on_disk), servers.each_ref().map(passed_on));
        eprintln!("epoch {epoch}: {disks:?} chunks, {passed:?} passed on");
        // Of so many chunks as in the long form, each server owns nearly a quarter, for which it has room.
        assert!(is_full() || epoch > 1 || passed.iter().sum::<f64>() > 0.0, "some owner has no room");
        // So that memory has nothing, and the next epoch reads the disks.
        for server in &mut servers {
            server.end();
            server.start();
        }
        assert_eq!(agree(&servers), view, "a restart moves nothing");
    }
}

#[test]
fn a_warm_up_fills_the_disks_of_all_owners() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let origin = Origin::start(15, 64, None);
    let [a, mut b] = ["a", "b"].map(|id| origin.server(id, &etcd, &[]));
    agreed(&[&a, &b], "a:up b:up", NEWS);
    let n = origin.data.files.len() as u64;
    let pinned = |servers: &[&ClusterServer]| -> Vec<f64> {
        servers.iter().map(|s| s.metric("fletch_warmup_pinned_chunks ").unwrap_or(-1.0)).collect()
    };
    let warmup = |server: &ClusterServer, more: &[&str]| {
        let mut c = command("fletch");
        let out =
            c.args(["warmup", "set", "--json", "--server", &server.url]).args(more).output().expect("runs");
        let told = serde_json::from_slice(&out.stdout).unwrap_or(serde_json::Value::Null);
        assert!(out.status.success(), "{told} {}", String::from_utf8_lossy(&out.stderr));
        told
    };
    let told = warmup(&a, &["--wait"]);
    assert_eq!((&told["fetched"]["chunks"], &told["missing"]["chunks"]), (&n.into(), &0.into()), "{told}");
    assert_eq!(origin.reads(), (n, n));
    let chunks = [&a, &b].map(|s| s.metric("fletch_disk_chunks ").unwrap_or(0.0));
    assert!(chunks.iter().sum::<f64>() == n as f64 && chunks.iter().all(|c| *c > 0.0), "{chunks:?}");
    // Each owner protects its chunks from eviction, until the warm-up is cancelled at the server that ran it.
    assert_eq!(pinned(&[&a, &b]), chunks);
    let id = told["id"].as_str().expect("an id");
    let url = format!("{}/v1/warmups/{id}", a.url);
    run(Command::new("curl").args(["-fsS", "-X", "DELETE", "--max-time", "10", &url]));
    until("no chunk is protected", NEWS, || pinned(&[&a, &b]) == [0.0, 0.0]);
    // From the other server: all is there, and is read where it lies.
    let told = warmup(&b, &["--wait"]);
    assert_eq!(told["present"]["chunks"], n, "{told}");
    let told = warmup(&b, &["--check"]);
    assert_eq!((&told["present"]["chunks"], &told["missing"]["chunks"]), (&n.into(), &0.into()), "{told}");
    assert_eq!(origin.reads(), (0, 0));
    assert_eq!(a.sum("fletch_peer_sent_bytes_total") + b.sum("fletch_peer_sent_bytes_total"), 0.0);
    // An eviction at one server is one at all of them, and ends the protection everywhere.
    assert_eq!(pinned(&[&a, &b]), chunks);
    let evict = |server: &ClusterServer| {
        let out = run(command("fletch").args(["evict", "set", "--json", "--server", &server.url]));
        let warned = String::from_utf8_lossy(&out.stderr).into_owned();
        (serde_json::from_slice::<serde_json::Value>(&out.stdout).expect("JSON"), warned)
    };
    let (told, warned) = evict(&a);
    assert_eq!((&told["chunks"], told.get("unconfirmed")), (&n.into(), None), "{told} {warned}");
    assert_eq!(pinned(&[&a, &b]), [0.0, 0.0]);
    assert_eq!([&a, &b].map(|s| s.metric("fletch_disk_chunks ")), [Some(0.0), Some(0.0)]);
    b.end();
    let (told, warned) = evict(&a);
    assert_eq!(told["unconfirmed"], serde_json::json!(["b"]), "{told}");
    assert!(warned.contains("b did not confirm it"), "{warned}");
}

#[test]
fn a_drained_server_and_a_new_one_cost_the_origin_nothing() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let origin = Origin::start(17, 96, None);
    let [mut a, mut b, c] = ["a", "b", "c"].map(|id| origin.server(id, &etcd, &[]));
    agreed(&[&a, &b, &c], "a:up b:up c:up", NEWS);
    let (readers, n) = (Readers::new(), origin.data.files.len() as u64);
    let read = |servers: &[&ClusterServer], seed: u64| {
        let got = readers.read_through(&urls(servers), &origin.root, &origin.shuffled(seed, 1), 16);
        assert_eq!((got.failed, got.bytes), (0, origin.data.bytes()));
        origin.reads()
    };
    assert_eq!(read(&[&a, &b, &c], 1), (n, n));
    let on_disk = |s: &ClusterServer| s.metric("fletch_disk_chunks ").unwrap_or(0.0);
    until("all chunks are on disks", Duration::from_secs(10), || {
        [&a, &b, &c].into_iter().map(on_disk).sum::<f64>() >= n as f64
    });
    let had = on_disk(&c);
    run(command("fletch").args(["cluster", "drain", "c", "--server", &a.url]));
    // So that their memory has nothing of what c owned.
    for server in [&mut a, &mut b] {
        server.end();
        server.start();
    }
    agreed(&[&a, &b, &c], "a:up b:up c:drained", NEWS);
    // What c owned moves to a and b when it is read. It comes from c.
    assert_eq!(read(&[&a, &b], 2), (0, 0));
    until("the others have all chunks", Duration::from_secs(10), || on_disk(&a) + on_disk(&b) >= n as f64);
    assert!(c.sum("fletch_peer_sent_bytes_total") >= had * FILE as f64);
    // A server that joins gets its part from them.
    let d = origin.server("d", &etcd, &[]);
    agreed(&[&a, &b, &d], "a:up b:up d:up c:drained", NEWS);
    assert_eq!(read(&[&d], 3), (0, 0));
    until("the new server has its chunks", Duration::from_secs(10), || on_disk(&d) > 0.2 * n as f64);
}

#[test]
fn a_quota_of_disk_is_divided_by_weight() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    // 64 MiB in 256 chunks. The tenant may have 16 MiB of all disks, which have 40 MiB and 120 MiB.
    let origin = Origin::start(16, 256, None);
    let scratch = tempfile::tempdir().expect("a directory");
    let at = |name: &str| scratch.path().join(name);
    let token = |name: &str, more: &[&str]| {
        let mut c = command("fletch-server");
        c.args(["token", "new", "--append"]).arg(at("tokens.toml")).args(more);
        fs::write(at(name), stdout(&run(&mut c))).expect("token");
    };
    token("client", &["--tenant", "t"]);
    token("peer", &["--role", "peer"]);
    token("monitor", &["--tenant", "ops", "--role", "monitor"]);
    let tokens = fs::read_to_string(at("tokens.toml")).expect("tokens");
    let quota = "\n[[tenant]]\nname = \"t\"\nresident = \"16MiB\"\n";
    fs::write(at("tokens.toml"), tokens + quota).expect("tokens");
    let [a, b] = [("a", "40MiB"), ("b", "120MiB")].map(|(id, size)| {
        let words = [
            format!("--auth-tokens={}", at("tokens.toml").display()),
            format!("--cluster-peer-token-file={}", at("peer").display()),
            format!("--cache-size={size}"),
            format!("--local-dirs={}=*", origin.scratch.path().display()),
        ];
        let words = words.each_ref().map(String::as_str);
        origin.server_as(id, &etcd, &words, Some(&at("client")))
    });
    let metric = |server: &ClusterServer, series: &str| -> Option<f64> {
        let text = get(&format!("{}/metrics", server.url), &at("monitor"), &[]).1;
        String::from_utf8_lossy(&text).lines().find_map(|l| l.strip_prefix(series)?.trim().parse().ok())
    };
    let sees_both = |s: &&ClusterServer| metric(s, "fletch_cluster_members{state=\"up\"} ") == Some(2.0);
    until("both servers are up", NEWS, || [&a, &b].iter().all(sees_both));
    let mut warmup = command("fletch");
    warmup.args(["warmup", "set", "--wait", "--server", &a.url, "--token-file"]).arg(at("client"));
    let out = warmup.output().expect("runs");
    let told = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && told.contains("quota `resident` leaves"), "{told}");
    let used = [&a, &b].map(|s| metric(s, "fletch_disk_chunk_bytes ").unwrap_or(0.0) / f64::from(1 << 20));
    // A quarter and three quarters of 16 MiB, of which the heads of chunks take a little.
    assert!((3.0..=4.0).contains(&used[0]) && (10.5..=12.0).contains(&used[1]), "{used:?}");
}

/// Reads an epoch of a new job through a server, and returns how many entries it delivered.
fn epoch(server: &ClusterServer, name: &str, order: OrderKind) -> u64 {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("runtime");
    runtime.block_on(async {
        let config = ClientConfig::new(server.url.parse().expect("a URL"), "loader");
        let ask = StartJob {
            name: name.parse().expect("name"),
            dataset: Some("set".parse().expect("name")),
            version: None,
            root: None,
            layout: None,
            seed: Some(3),
            order,
            buckets: None,
            replay: None,
            plan: PlanSpec::default(),
            world: WorldSpec { ranks: 1, batch: 8, tail: Tail::Drop },
            visitation: Visitation::ExactlyOnce,
        };
        let job = Client::new(config).expect("client").declare(&ask).await.expect("declared");
        let mut reader = job.reader(0, 0, 0).prefetch(1).patience(Duration::from_secs(30));
        let mut entries = 0;
        loop {
            match reader.next(8).await.expect("a lease") {
                Next::Batch(b) => {
                    let ack = Ack { lease: b.token.lease, upto: b.token.entries, batches: Vec::new() };
                    job.ack(0, 0, &[ack]).await.expect("acknowledged");
                    job.held().release(0, 0, b.token.lease);
                    entries += u64::from(b.token.entries);
                }
                Next::Full | Next::Last => tokio::time::sleep(Duration::from_millis(20)).await,
                Next::Done => return entries,
            }
        }
    })
}

#[test]
fn epochs_read_what_other_servers_own() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let origin = Origin::start(17, 64, None);
    let [a, b] = ["a", "b"].map(|id| origin.server(id, &etcd, &[]));
    agreed(&[&a, &b], "a:up b:up", NEWS);
    let n = origin.data.files.len() as u64;
    // What is fetched ahead comes from its owners, which keep it.
    let received = || [&a, &b].map(|s| s.sum("fletch_peer_received_bytes_total")).iter().sum::<f64>();
    assert_eq!(epoch(&a, "first", OrderKind::Strict), n);
    assert_eq!(origin.reads(), (n, n));
    assert!(received() > 0.0);
    assert_eq!(epoch(&b, "second", OrderKind::Strict), n);
    assert_eq!(origin.reads(), (0, 0), "both disks together have all");
    // A sweep keeps its units on its own server. What the other one has need not come from the origin.
    let before = received();
    assert_eq!(epoch(&a, "swept", OrderKind::Substitute), n);
    assert!(received() > before);
    assert_eq!(origin.reads(), (0, 0));
}

/// Returns the chunks of a pack that was written below a directory.
fn chunks_below(dir: &Path) -> Vec<Hash> {
    let mut found = Vec::new();
    for part in fs::read_dir(dir.join("fletch/chunks")).expect("chunks") {
        for chunk in fs::read_dir(part.expect("entry").path()).expect("chunks") {
            let name = chunk.expect("entry").file_name();
            found.push(name.to_string_lossy().parse().expect("a hash"));
        }
    }
    found.sort();
    found
}

#[test]
fn servers_whose_readers_wait_for_each_other_all_go_on() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let data = Data::new(7, 120, 3 << 20);
    let scratch = TempDir::with_prefix("fletch-crossed-").expect("scratch");
    let tables = scratch.path().join("pack");
    let mut pack = command("fletch");
    pack.arg("pack").arg(&data.dir).arg("--to").arg(&tables).args(["--chunk-size", "16MiB"]);
    let root = stdout(&run(pack.arg("--state-dir").arg(scratch.path().join("state"))));
    let chunks = chunks_below(&tables);
    // Each server needs more of the other one than its memory holds.
    assert!(chunks.len() >= 20, "{} chunks", chunks.len());
    // 128 MiB is the least memory of a server in a cluster. Nothing is kept on a disk.
    let [a, b] = ["a", "b"].map(|id| {
        let more = ["--cache-size=0", "--cluster-weight=100", "--io-timeout=60s"];
        let mut server = ClusterServer::new(id, &etcd, &more);
        server.start();
        server.register("set", &data.dir.display().to_string(), &tables.display().to_string(), None);
        server
    });
    agreed(&[&a, &b], "a:up b:up", NEWS);
    // 200 readers: a chunk each, through the server that does not own it.
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("runtime");
    let http = reqwest::Client::builder().timeout(Duration::from_secs(90)).build().expect("client");
    let placement = {
        let member = |id: &str| Member { id: id.to_owned(), weight: 100.0 };
        Placement::new([member("a"), member("b")])
    };
    runtime.block_on(async {
        let mut all = tokio::task::JoinSet::new();
        for i in 0..200 {
            let hash = chunks[i % chunks.len()];
            let owner = placement.owner(&key(hash)).expect("one").id.clone();
            let server = if owner == "a" { &b } else { &a };
            let url = format!("{}/v1/versions/{root}/chunks/{hash}", server.url);
            let http = http.clone();
            all.spawn(async move {
                let answer = http.get(&url).send().await.expect("an answer");
                let status = answer.status().as_u16();
                let body = answer.bytes().await.expect("a body");
                assert!(status == 200, "{status}: {}", String::from_utf8_lossy(&body));
                assert_eq!(Hash::of(&body), hash, "I1");
            });
        }
        while let Some(done) = all.join_next().await {
            done.expect("a reader");
        }
    });
    for server in [&a, &b] {
        for series in ["fletch_deadline_total ", "fletch_overloaded_total "] {
            assert_eq!(server.metric(series), Some(0.0), "{series}");
        }
        assert!(server.sum("fletch_peer_received_bytes_total") > 0.0);
    }
    // A file of a pack that another server owns comes alone.
    let before = a.sum("fletch_peer_received_bytes_total") + b.sum("fletch_peer_received_bytes_total");
    let readers = Readers::new();
    let got = readers.read_through(&urls(&[&a, &b]), &root, &data.files, 4);
    assert_eq!((got.failed, got.bytes), (0, data.bytes()));
    let after = a.sum("fletch_peer_received_bytes_total") + b.sum("fletch_peer_received_bytes_total");
    assert!(after - before <= data.bytes() as f64, "{} of {}", after - before, data.bytes());
}

#[test]
fn a_server_with_an_old_view_costs_no_second_fetch() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let origin = Origin::start(11, 128, None);
    // A server without news stays up for the others. In the long form it has none for a minute.
    let (stale, ttl) = if is_full() { (60, 60) } else { (0, 40) };
    let ttl = format!("--cluster-member-ttl={ttl}s");
    let more = [&*ttl];
    let [a, b, c] = ["a", "b", "c"].map(|id| origin.server(id, &etcd, &more));
    let old = agreed(&[&a, &b, &c], "a:up b:up c:up", NEWS);
    let readers = Readers::new();
    let half: Vec<_> = origin.data.files.iter().take(64).cloned().collect();
    let got = readers.read_through(&urls(&[&a, &b, &c]), &origin.root, &half, 8);
    assert_eq!((got.failed, got.bytes), (0, origin.data.bytes() / 2));
    a.cut_all(true);
    let d = origin.server("d", &etcd, &more);
    agreed(&[&b, &c, &d], "a:up b:up c:up d:up", NEWS);
    assert_eq!(a.view_number(), old);
    let begun = Instant::now();
    // The old half is cached, the new one is cold, and a quarter of both has moved.
    for seed in 1.. {
        let got = readers.read_through(&urls(&[&a, &b, &c, &d]), &origin.root, &origin.shuffled(seed, 4), 32);
        assert_eq!((got.failed, got.bytes), (0, 4 * origin.data.bytes()));
        if begun.elapsed() >= Duration::from_secs(stale) {
            break;
        }
        std::thread::sleep(Duration::from_secs(2));
    }
    assert_eq!(a.view_number(), old, "its news was withheld all the time");
    let (gets, objects) = origin.reads();
    println!("origin: {gets} reads of {objects} objects");
    assert!(gets * 100 <= 110 * origin.data.files.len() as u64, "{gets} reads");
    let told = |s: &ClusterServer, word: &str| {
        let text = s.text("/metrics");
        let rows = text.lines().filter(|l| l.starts_with("fletch_peer_requests_total") && l.contains(word));
        rows.filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>()
    };
    assert!(told(&a, "result=\"wrong_server\"") > 0.0, "{}", a.text("/metrics"));
    assert!(told(&d, "result=\"hit\"") > 0.0, "d got chunks from their former owners");
    a.cut_all(false);
    agreed(&[&a, &b, &c, &d], "a:up b:up c:up d:up", Duration::from_secs(stale + 20));
}
