//! Several servers and a real etcd: who is a member, who is up, and what remains while parts are gone.

use fletch_testkit::tls;
use fletch_tests::bins::{bin, command, run, stdout, without_variables};
use fletch_tests::cluster::{ClusterServer, EtcdCluster, agreed};
use fletch_tests::fixture::index;
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

/// How soon all servers have seen a change that etcd knows.
const NEWS: Duration = Duration::from_secs(1);
/// How soon all servers have seen a server that ended without a word: `member_ttl` and etcd's own delay.
const SILENCE: Duration = Duration::from_secs(6);

fn servers<const N: usize>(etcd: &EtcdCluster, more: &[&str]) -> [ClusterServer; N] {
    let names = ["a", "b", "c"];
    std::array::from_fn(|i| {
        let mut server = ClusterServer::new(names[i], etcd, more);
        server.start();
        server
    })
}

#[test]
fn a_view_survives_servers_and_etcd() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let mut etcd = EtcdCluster::start(3);
    let [a, mut b] = servers(&etcd, &[]);
    let two = agreed(&[&a, &b], "a:up b:up", NEWS);

    // A third one joins, and a client that waits for its view gets it.
    let mut c = ClusterServer::new("c", &etcd, &[]);
    let waiting = Command::new("curl")
        .args(["-sS", "--max-time", "12"])
        .arg(format!("{}/v1/cluster?after={two}&wait_ms=10000", a.url))
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("curl runs");
    c.start();
    let view = agreed(&[&a, &b, &c], "a:up b:up c:up", NEWS);
    let waited = waiting.wait_with_output().expect("curl ends");
    let waited: serde_json::Value = serde_json::from_slice(&waited.stdout).expect("JSON");
    assert_eq!(waited["view"].as_u64(), Some(view));
    let head = a.text("/v1/cluster").to_lowercase();
    assert!(
        head.contains(&format!("fletch-view: {view}\r\n")) && head.contains(&format!("etag: \"{view}-")),
        "{head}"
    );
    assert!(a.text("/no/such/route").to_lowercase().contains(&format!("fletch-view: {view}\r\n")));

    // A restart moves no ownership, whether the server said a word or not.
    b.end();
    agreed(&[&a, &c], "a:up b:restarting c:up", NEWS);
    b.start();
    assert_eq!(agreed(&[&a, &b, &c], "a:up b:up c:up", NEWS), view);
    b.kill();
    agreed(&[&a, &c], "a:up b:down c:up", SILENCE);
    b.start();
    assert_eq!(agreed(&[&a, &b, &c], "a:up b:up c:up", NEWS), view);

    // Something to read.
    let tree = a.place("tree");
    fs::write(tree.join("f"), b"the bytes").expect("write");
    let root = index(&tree, &a.place("tables"), &[]);
    let mut register = command("fletch");
    register.arg("register").arg("d").arg(&tree).arg("--tables").arg(a.place("tables"));
    run(register.args(["--server", &a.url]));
    let file = format!("/v1/versions/{root}/files/f");
    assert!(a.text(&file).ends_with("the bytes"));

    // etcd loses its leader: nobody notices.
    let leader = etcd.leader().expect("a leader");
    etcd.kill(leader);
    let end = Instant::now() + Duration::from_secs(4);
    while Instant::now() < end {
        assert_eq!((a.view_number(), &*a.members()), (view, "a:up b:up c:up"));
        std::thread::sleep(Duration::from_millis(200));
    }
    // etcd loses its majority: the view stays, reads go on, and a restart starts from the last view.
    let second = (0..3).find(|i| *i != leader).expect("another one");
    etcd.kill(second);
    let lost = || a.metric("fletch_cluster_coordinator_up ") == Some(0.0);
    until("the loss of etcd is a metric", Duration::from_secs(6), lost);
    b.kill();
    b.start();
    assert_eq!((b.status("/readyz"), b.view_number()), (200, view));
    assert_eq!((a.view_number(), &*a.members()), (view, "a:up b:up c:up"));
    assert!(a.text(&file).ends_with("the bytes"));
    etcd.revive(leader);
    etcd.revive(second);
    until("etcd is back", Duration::from_secs(10), || etcd.leader().is_some());
    let back = Instant::now();
    let up = |s: &ClusterServer| s.metric("fletch_cluster_coordinator_up ") == Some(1.0);
    until("all servers are in touch again", Duration::from_secs(5), || [&a, &b, &c].into_iter().all(up));
    let within = Duration::from_secs(5).saturating_sub(back.elapsed());
    assert_eq!(agreed(&[&a, &b, &c], "a:up b:up c:up", within), view);
}

/// Runs the example of `docs/CLUSTER.md` as it stands there, in a network and a `/tmp` of its own. Then a
/// dataset that was registered at one server is read through another one.
#[test]
fn the_example_of_the_documentation_runs_as_it_stands() {
    if !have(&[Need::Etcd, Need::Root]) {
        return;
    }
    let text = include_str!("../../docs/CLUSTER.md");
    let after = text.split_once("## Three servers on one machine\n\n```sh\n").expect("the example").1;
    let example = after.split_once("```").expect("its end").0;
    assert!(example.lines().count() <= 10, "{example}");
    let script = format!(
        r#"ip link set lo up && mount -t tmpfs tmpfs /tmp || exit 9
export HOME=/tmp
{example}
for i in $(seq 100); do
    fletch cluster status --server http://127.0.0.1:7382 > /tmp/status 2>&1
    [ "$(grep -c ' up ' /tmp/status)" = 3 ] && break
    sleep 0.1
done
cat /tmp/status
mkdir /tmp/tree && echo "the bytes" > /tmp/tree/f
root=$(fletch index /tmp/tree --to /tmp/tables) || exit 8
fletch register d /tmp/tree --tables /tmp/tables --server http://127.0.0.1:7381 || exit 7
sleep 1
curl -sSf "http://127.0.0.1:7383/v1/versions/$root/files/f""#
    );
    let bins = bin("fletch-server");
    let path = format!("{}:{}:/usr/sbin", bins.parent().expect("a directory").display(), env!("PATH"));
    let mut c = without_variables(Command::new("unshare"));
    // With the end of the script, all of its processes end.
    c.args(["--net", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", &script]).env("PATH", path);
    let out = run(&mut c);
    let told = String::from_utf8_lossy(&out.stdout);
    assert!(told.ends_with("the bytes\n"), "{told}");
    assert!((1..=3).all(|i| told.contains(&format!("srv-{i}"))), "{told}");
}

#[test]
fn silent_and_drained_servers_leave_the_ring() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let [mut a, b, mut c] = servers(&etcd, &["--cluster-forget-after=2s", "--cluster-zone=z"]);
    let all = agreed(&[&a, &b, &c], "a:up b:up c:up", NEWS);

    // A server that is cut off from etcd is down for the others, and goes on with its view.
    b.cut_all(true);
    agreed(&[&a, &c], "a:up b:down c:up", SILENCE);
    assert_eq!(b.view_number(), all);
    b.cut_all(false);
    agreed(&[&a, &b, &c], "a:up b:up c:up", SILENCE);

    c.kill();
    let without = agreed(&[&a, &b], "a:up b:up", SILENCE + Duration::from_secs(2));
    assert!(without > all);
    c.start();
    agreed(&[&a, &b, &c], "a:up b:up c:up", NEWS);

    let fletch = |words: &[&str]| stdout(&run(command("fletch").args(words).args(["--server", &b.url])));
    let told = fletch(&["cluster", "drain", "a"]);
    assert!(told.contains("a\tdrained\t0 % of the chunks"), "{told}");
    agreed(&[&a, &b, &c], "b:up c:up a:drained", NEWS);
    assert_eq!(a.status("/readyz"), 200);
    assert!(fletch(&["cluster", "status"]).contains("b\tup\t50 % of the chunks\thttp://"), "{told}");
    let mut again = command("fletch");
    let again = again.args(["cluster", "drain", "nobody", "--server", &b.url]).output().expect("fletch runs");
    assert!(!again.status.success() && String::from_utf8_lossy(&again.stderr).contains("no member nobody"));
    // It stays out until it restarts.
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(a.members(), "b:up c:up a:drained");
    a.end();
    agreed(&[&b, &c], "b:up c:up", NEWS);
    a.start();
    agreed(&[&a, &b, &c], "a:up b:up c:up", NEWS);
}

#[test]
fn a_server_starts_only_where_it_belongs() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let [mut a] = servers(&etcd, &["--cluster-stale-max=2s"]);
    let view = agreed(&[&a], "a:up", NEWS);

    let told = ClusterServer::new("a", &etcd, &[]).start_in_vain();
    assert!(told.contains("another server is up as a at http://127.0.0.1:"), "{told}");
    assert_eq!(a.members(), "a:up");

    // A server that never joined waits, and says so.
    let mut late = ClusterServer::new("late", &etcd, &[]);
    late.cut_all(true);
    late.start();
    let told = late.text("/readyz");
    assert!(told.contains(" 503 ") && told.contains("has not joined its cluster yet"), "{told}");
    assert_eq!(late.status("/startupz"), 200);
    late.cut_all(false);
    agreed(&[&a, &late], "a:up late:up", SILENCE);
    assert_eq!(late.status("/readyz"), 200);

    // Without etcd for longer than `stale_max`, a server is not ready.
    a.cut_all(true);
    until("the view is too old", Duration::from_secs(6), || a.status("/readyz") == 503);
    assert!(a.text("/readyz").contains("cluster.stale_max"));
    a.cut_all(false);
    until("the server is ready again", Duration::from_secs(5), || a.status("/readyz") == 200);

    // The state of a cluster goes with the cluster.
    a.end();
    late.end();
    etcd.wipe();
    // A server whose etcd lost its keys goes on as it does without etcd, and writes nothing.
    a.start();
    assert!(a.log().contains("etcd has no such cluster now") && a.log().contains("fletch cluster recover"));
    assert!(a.metric("fletch_cluster_coordinator_up ") == Some(0.0));
    a.end();
    let mut first = ClusterServer::new("first", &etcd, &[]);
    first.start();
    assert!(agreed(&[&first], "first:up", NEWS) > view);
    let told = a.start_in_vain();
    assert!(told.contains("and etcd has one with the uid"), "{told}");
}

#[test]
fn etcd_may_speak_tls_and_ask_for_a_user() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let mut etcd = EtcdCluster::start_secure();
    let ca = format!("--cluster-ca-file={}", tls::authority().display());
    let dir = tempfile::tempdir().expect("scratch");
    let file = dir.path().join("password");
    fs::write(&file, "secret\n").expect("write");
    let file = format!("--cluster-password-file={}", file.display());
    let [a] = servers(&etcd, &[&ca, "--cluster-user=fletch", &file]);
    let view = agreed(&[&a], "a:up", NEWS);

    // Without a user, and without the authority: not ready, with the reason.
    let mut stranger = ClusterServer::new("stranger", &etcd, &[&ca]);
    stranger.start();
    assert!(stranger.text("/readyz").contains("check cluster.user"), "{}", stranger.text("/readyz"));
    let mut other = ClusterServer::new("other", &etcd, &["--cluster-user=fletch", &file]);
    other.start();
    let told = other.text("/readyz");
    assert!(told.contains(" 503 ") && told.contains("certificate"), "{told}");

    // etcd forgets its tokens when it starts again. The server logs in again.
    etcd.kill(0);
    let up = |n| a.metric("fletch_cluster_coordinator_up ") == Some(n);
    until("the loss of etcd is a metric", Duration::from_secs(6), || up(0.0));
    etcd.revive(0);
    until("the server is in touch again", Duration::from_secs(10), || up(1.0));
    assert_eq!(agreed(&[&a], "a:up", NEWS), view);
}

/// Copies a directory with all that is in it.
fn copy_all(from: &std::path::Path, to: &std::path::Path) {
    drop(stdout(&run(Command::new("cp").arg("-a").arg(from).arg(to))));
}

#[test]
fn of_two_servers_with_one_state_one_keeps_the_name() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let [a, b] = servers(&etcd, &[]);
    let view = agreed(&[&a, &b], "a:up b:up", NEWS);
    let mut copy = ClusterServer::new("a", &etcd, &[]);
    copy_all(&a.place("state").join("."), &copy.place("state"));
    let log = copy.start_in_vain();
    assert!(log.contains("another server is up as a at") && log.contains("a copy of this state"), "{log}");
    assert_eq!(agreed(&[&a, &b], "a:up b:up", NEWS), view);

    // The first one is paused until it counts as down. Then the copy has the name.
    a.signal(nix::sys::signal::Signal::SIGSTOP);
    until("it counts as down", SILENCE, || b.members() == "a:down b:up");
    copy.start();
    agreed(&[&copy, &b], "a:up b:up", NEWS);
    a.signal(nix::sys::signal::Signal::SIGCONT);
    until("the first one says that it has lost the name", SILENCE, || {
        a.log().contains("another server is up as a at") && a.status("/livez") == 200
    });
    // Nobody writes over the other one's key.
    let before = etcd.revision();
    std::thread::sleep(Duration::from_secs(2));
    assert!(etcd.revision() <= before + 2, "{} revisions in two seconds", etcd.revision() - before);
}
