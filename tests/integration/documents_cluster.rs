//! Documents that run, beside several servers: the commands of CLUSTER, OPERATIONS and the runbooks.
//!
//! Each command of these documents is executed: by a test of this file, in the words of the document, or by
//! the test that [`BY_OTHERS`] names. [`NOT_HERE`] has those that no test executes, with the reason. A new
//! command fails `every_command_is_executed_or_excused` until it is in one of the lists. The parser of its
//! program reads every command of Fletch in any case.

use fletch_api::{BatchTimes, OrderKind, PlanSpec, StartJob, Visitation, WorldSpec};
use fletch_client::{
    Client, ClientConfig, ClientError,
    epochs::{JobHandle, Next},
};
use fletch_core::plan::Tail;
use fletch_tests::bins::{Running, repo, without_variables};
use fletch_tests::cluster::{ClusterServer, EtcdCluster, agreed};
use fletch_tests::cluster_data::ClusterData;
use fletch_tests::commands::{
    Shown, agrees, calls, commands, hidden_commands, is_a_test, refused, run_as_reader,
};
use fletch_tests::fixture::is_mounted;
use fletch_tests::prometheus::Prometheus;
use fletch_tests::python::Installed;
use fletch_tests::require::{Need, have};
use fletch_tests::tree::files;
use fletch_tests::watch::until;
use nix::sys::signal::Signal;
use std::cell::RefCell;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;
use tokio::task::JoinSet;

const CLUSTER: &str = "docs/CLUSTER.md";
const OPERATIONS: &str = "docs/OPERATIONS.md";
const JOB_WAITS: &str = "docs/runbooks/FletchJobWaitsForServer.md";
const NO_COORDINATOR: &str = "docs/runbooks/FletchNoCoordinator.md";
const REFRESH_FAILED: &str = "docs/runbooks/FletchRefreshFailed.md";
const STATE_DISK: &str = "docs/runbooks/FletchStateDiskFull.md";

const JOBS: &str = "jobs_are_moved_and_restored_as_the_documents_say";
const ETCD: &str = "an_etcd_without_keys_is_recovered_as_the_documents_say";
const MOUNTS: &str = "mounts_find_servers_as_the_documents_say";
const DATASETS: &str = "datasets_and_servers_are_managed_as_the_documents_say";

/// The commands that tests of this file execute: the test, the document and the command.
const HERE: &[(&str, &str, &str)] = &[
    (JOBS, CLUSTER, "fletch jobs move JOB --to MEMBER"),
    (JOBS, CLUSTER, "fletch jobs lost train-7 --rank 3"),
    (JOBS, JOB_WAITS, "fletch jobs lost JOB --rank R"),
    (JOBS, CLUSTER, "curl --location-trusted …"),
    (JOBS, CLUSTER, "fletch jobs restore JOB --state FILE"),
    (JOBS, STATE_DISK, "fletch jobs show JOB"),
    (JOBS, STATE_DISK, "fletch jobs delete JOB"),
    (JOBS, CLUSTER, "fletch cluster drain ID"),
    (ETCD, CLUSTER, "fletch cluster recover --dry-run --server http://cache-1.example:7380"),
    (ETCD, CLUSTER, "fletch cluster recover --server http://cache-1.example:7380"),
    (ETCD, CLUSTER, "fletch cluster check --server http://cache-1.example:7380"),
    (MOUNTS, CLUSTER, "fletch-mount photos /mnt/photos --server http://cache-1.example:7380, …"),
    (MOUNTS, CLUSTER, "fletch-mount photos /mnt/photos --server http://fletch.default.svc:7380"),
    (MOUNTS, OPERATIONS, "fletch-mount --datasets /run/fletch/vision/datasets …"),
    (MOUNTS, OPERATIONS, "fletch-mount --hold /run/fletch/.keeper/socket --hold-below /run/fletch"),
    (MOUNTS, OPERATIONS, "fletch-mount --keeper /run/fletch/.keeper/socket …"),
    (MOUNTS, OPERATIONS, "fletch-mount --cache-size SIZE"),
    (MOUNTS, OPERATIONS, "curl --unix-socket DIR/node.sock http://localhost/node/v1/state"),
    (DATASETS, CLUSTER, "fletch.Client( …"),
    (DATASETS, CLUSTER, "fletch register --replace"),
    (DATASETS, CLUSTER, "fletch-server token new --role peer --append tokens.toml --out peer.token"),
    (DATASETS, OPERATIONS, "fletch-server token new --tenant vision --domain research --role reader …"),
    (DATASETS, OPERATIONS, "fletch-server --listen none --socket ~/.fletch/s.sock --idle 10m …"),
    (DATASETS, OPERATIONS, "fletch warmup NAME[@TAG] --wait"),
    (DATASETS, OPERATIONS, "fletch evict NAME"),
    (DATASETS, OPERATIONS, "fletch refresh NAME"),
    (DATASETS, REFRESH_FAILED, "fletch refresh NAME"),
    (DATASETS, REFRESH_FAILED, "fletch seal NAME"),
    (DATASETS, "docs/runbooks/FletchMountBroken.md", "fletch doctor SOURCE --tables TABLES"),
];

/// The commands that other tests execute: the document, the command and the test.
const BY_OTHERS: &[(&str, &str, &str)] = &[
    (CLUSTER, "etcd --data-dir /tmp/etcd …", "cluster::the_example_of_the_documentation_runs_as_it_stands"),
    (
        OPERATIONS,
        "fletch-server config show --effective",
        "documents::every_setting_of_the_server_is_documented",
    ),
    (
        OPERATIONS,
        "fletch-mount --datasets DIR --server URL",
        "documents::semantics_are_executed_among_all_datasets",
    ),
    (OPERATIONS, "fletch-mount --status DIR", STATUS),
    (OPERATIONS, "promtool check rules FILES", "alerts::the_rules_and_their_unit_tests_hold"),
    (OPERATIONS, "promtool test rules tests/alerts/*.yaml", "alerts::the_rules_and_their_unit_tests_hold"),
];

/// The test that asks for the processes of a mount.
const STATUS: &str = "install::the_units_keep_a_mount_and_replace_what_serves_it";

/// The test that runs every block `sh diagnose` of every runbook of an alert. The remedy of [`READERS_WAIT`]
/// runs the blocks of its own page.
const DIAGNOSES: &str = "alerts::every_diagnostic_command_runs";

/// The runbooks with a remedy, and the tests that run it in the state of the alert.
const REMEDIES: &[(&str, &str)] = &[
    ("FletchCacheFull", "alerts::a_disk_that_is_full_or_read_only_is_repaired"),
    ("FletchDiskFailing", "alerts::a_disk_that_is_full_or_read_only_is_repaired"),
    ("FletchJobStalled", "alerts::every_diagnostic_command_runs"),
    (
        "FletchJobWaitsForServer",
        "cluster_alarms::jobs_that_wait_for_a_lost_server_are_an_alarm_until_its_remedy",
    ),
    ("FletchMountBroken", "alerts::a_server_that_stopped_is_started_again"),
    ("FletchNoCoordinator", "cluster_recover::servers_that_run_write_back_what_etcd_lost"),
    ("FletchOriginErrors", "alerts::a_dataset_that_moved_is_registered_anew"),
    ("FletchScrapeDown", "alerts::a_server_that_stopped_is_started_again"),
    ("FletchThrashing", "alerts::a_cache_that_thrashes_gets_another_policy"),
    ("FletchWrongBytes", "alerts::a_dataset_that_was_changed_is_indexed_anew"),
    ("readers-wait", READERS_WAIT),
];

/// The test that runs all blocks of the runbook without an alert.
const READERS_WAIT: &str = "documents::readers_that_wait_go_on_as_the_runbook_says";

/// The commands that no test executes, and the reason.
const NOT_HERE: &[(&str, &str)] = &[
    ("aws sso login", "it needs an account at a store"),
    ("chmod 700", "a command of the system without its argument"),
    ("etcdctl alarm list", "the tests install etcd without its client; it changes nothing"),
    (
        "etcdctl del --prefix /fletch/NAME/",
        "the tests install etcd without its client, and delete keys by its gateway",
    ),
    ("etcdctl endpoint status --cluster", "the tests install etcd without its client; it changes nothing"),
    ("helm upgrade", "there is no Kubernetes; `make accept-images` runs what the chart renders"),
    ("journalctl -u fletch-server", "there is no systemd"),
    ("kill -9", "a command of the system without its argument"),
    ("kubectl -n fletch port-forward service/fletch 7380", "there is no Kubernetes"),
    ("kubectl describe certificate", "there is no Kubernetes"),
    ("kubectl describe pod", "there is no Kubernetes"),
    ("kubectl logs", "there is no Kubernetes"),
    ("systemctl restart fletch-server", "there is no systemd"),
    ("umount -l", "`fletch-mount` does it itself"),
];

/// How soon all servers have seen a change that etcd knows.
const NEWS: Duration = Duration::from_secs(3);
/// How soon a killed server counts as down: `cluster.member_ttl` of the rig, and etcd's own delay.
const SILENCE: Duration = Duration::from_secs(8);
/// How long a job may take to be at another server.
const MOVE: Duration = Duration::from_secs(25);
const SAMPLES: u32 = 96;

fn read(document: &str) -> String {
    fs::read_to_string(repo().join(document)).unwrap_or_else(|e| panic!("{document}: {e}"))
}

/// Returns the documents whose commands are executed.
fn documents() -> Vec<String> {
    let all = files().into_iter().map(|file| file.path);
    let own = |path: &String| {
        [CLUSTER, OPERATIONS].contains(&path.as_str())
            || path.starts_with("docs/runbooks/") && path.ends_with(".md")
    };
    let found: Vec<String> = all.filter(own).collect();
    assert!(found.len() > 20, "{found:?}");
    found
}

/// Whether an entry of a list is this command. At the end of an entry, `…` stands for the rest.
fn is_entry(entry: &str, shown: &Shown) -> bool {
    match entry.strip_suffix('…') {
        Some(begin) => shown.text.starts_with(begin.trim_end()),
        None => shown.text == entry,
    }
}

/// Whether a command of a document is in one of the lists.
fn is_decided(document: &str, shown: &Shown) -> bool {
    let is_it = |doc: &str, entry: &str| doc == document && is_entry(entry, shown);
    match shown.block.as_deref() {
        Some("sh diagnose") => document != "docs/runbooks/README.md",
        Some("sh remedy") => {
            REMEDIES.iter().any(|(alert, _)| document == format!("docs/runbooks/{alert}.md"))
        }
        _ if shown.is_name() => true,
        _ => {
            HERE.iter().any(|(_, doc, command)| is_it(doc, command))
                || BY_OTHERS.iter().any(|(doc, command, _)| is_it(doc, command))
                || NOT_HERE.iter().any(|(command, _)| shown.text == *command)
        }
    }
}

/// Returns the commands of a document that nobody has decided about.
fn undecided(document: &str, text: &str) -> Vec<String> {
    let shown = commands(text).into_iter().filter(|shown| !is_decided(document, shown));
    let open = shown.map(|shown| format!("{document}:{}: {}", shown.line, shown.text));
    open.chain(hidden_commands(text).into_iter().map(|hidden| format!("{document}: {hidden}"))).collect()
}

#[test]
fn every_command_is_executed_or_excused() {
    let mut faults = Vec::new();
    let mut all = String::new();
    for document in documents() {
        let text = read(&document);
        faults.extend(undecided(&document, &text));
        all.push_str(&text);
    }
    // No list has what no document shows.
    let shows = |document: &str, command: &str| {
        commands(&read(document)).iter().any(|shown| is_entry(command, shown))
    };
    for (_, document, command) in HERE {
        if !shows(document, command) {
            faults.push(format!("{document} does not show {command}"));
        }
    }
    for (document, command, test) in BY_OTHERS {
        if !shows(document, command) || !is_a_test(test) {
            faults.push(format!("{document} does not show {command}, or there is no test {test}"));
        }
    }
    for (alert, test) in REMEDIES.iter().chain(&[("FletchNoCoordinator", DIAGNOSES)]) {
        if !is_a_test(test) || !read(&format!("docs/runbooks/{alert}.md")).contains("```sh remedy\n") {
            faults.push(format!("{alert} has no remedy, or there is no test {test}"));
        }
    }
    let of_all = commands(&all);
    for (command, _) in NOT_HERE {
        if !of_all.iter().any(|shown| shown.text == *command) {
            faults.push(format!("no document shows {command}"));
        }
    }
    for (test, ..) in HERE {
        assert!(is_a_test(&format!("documents_cluster::{test}")), "{test}");
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn a_new_command_is_noticed() {
    for text in [
        "Run `fletch jobs move JOB --now`.",
        "```sh\nfletch cluster drain ID --force\n```",
        "```console\n$ fletch cluster status\nup\n```",
        "```text\n$ fletch cluster status\n```",
        "```sh remedy\nfletch cluster recover\n```",
        "Run `kubectl delete pod fletch-0`.",
    ] {
        assert_eq!(undecided(CLUSTER, text).len(), 1, "{text}");
    }
    for text in ["The command `fletch jobs list` names them.", "```text\nWARN fletch\n```", "A `ring`."] {
        assert_eq!(undecided(CLUSTER, text), Vec::<String>::new());
    }
    let of = |command: &str| calls(command).iter().map(|call| call.join(" ")).collect::<Vec<_>>();
    assert_eq!(
        of("X=1 fletch a | grep b && fletch-server --c 'd e' > f &"),
        ["fletch a", "fletch-server --c d e"]
    );
    assert_eq!(of("kubectl exec -it pod/x -- fletch jobs list"), ["fletch jobs list"]);
    assert_eq!(of("root=$(fletch index x) || exit"), ["fletch index x"]);
    let words = |call: &str| call.split(' ').map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(refused(&words("fletch jobs move JOB --to MEMBER")), None);
    assert!(refused(&words("fletch jobs move JOB --at MEMBER")).is_some());
    assert!(refused(&words("fletch jobs mov JOB")).is_some());
}

#[test]
fn every_command_of_fletch_is_accepted_by_its_parser() {
    // Strings that hashes begin with look like commands in FORMATS.
    let is_document = |path: &str| {
        path == "README.md" || path.starts_with("docs/") && path.ends_with(".md") && !path.contains("FORMATS")
    };
    let mut said = Vec::new();
    let mut count = 0;
    for file in files().into_iter().filter(|file| is_document(&file.path)) {
        for shown in commands(&file.text) {
            for call in calls(&shown.text) {
                count += 1;
                said.extend(refused(&call).map(|why| format!("{}:{}: {why}", file.path, shown.line)));
            }
        }
    }
    assert!(count > 200, "{count} calls");
    assert!(said.is_empty(), "{} of {count}\n{}", said.len(), said.join("\n"));
}

/// Servers `cache-1` … of a cluster that know the dataset `photos`.
struct Rig {
    etcd: EtcdCluster,
    set: ClusterData,
    servers: Vec<ClusterServer>,
}

fn id_of(at: usize) -> String {
    format!("cache-{}", at + 1)
}

impl Rig {
    /// Starts servers, each with more flags.
    fn start(flags: &[&[&str]]) -> Self {
        let (etcd, set) = (EtcdCluster::start(1), ClusterData::new(61, SAMPLES.into()));
        let mut servers = Vec::new();
        for (at, more) in flags.iter().enumerate() {
            let words = [&["--cache-free-floor=0"], *more].concat();
            let mut server = ClusterServer::new(&id_of(at), &etcd, &words);
            server.start();
            servers.push(server);
        }
        let rig = Rig { etcd, set, servers };
        rig.all_up();
        let uri = rig.set.data.dir.display().to_string();
        rig.servers[0].register("photos", &uri, &rig.set.tables.display().to_string(), None);
        let know = |s: &ClusterServer| s.text("/v1/datasets").contains("\"photos\"");
        until("all know the dataset", NEWS, || rig.servers.iter().all(know));
        rig
    }

    fn all_up(&self) {
        let all: Vec<String> = (0..self.servers.len()).map(|at| format!("{}:up", id_of(at))).collect();
        agreed(&self.servers.iter().collect::<Vec<_>>(), &all.join(" "), SILENCE);
    }

    /// Returns the URLs of all servers, as a client names them.
    fn list(&self) -> String {
        self.servers.iter().map(|s| s.url.as_str()).collect::<Vec<_>>().join(",")
    }

    fn client(&self, at: usize) -> Client {
        Client::new(ClientConfig::new(self.servers[at].url.parse().expect("url"), "loader")).expect("client")
    }

    fn at(&self, url: &str) -> usize {
        self.servers.iter().position(|s| s.url == url).expect("a server of the cluster")
    }
}

/// The reader of the documents: executes the commands that [`HERE`] has for a test.
struct Reader {
    test: &'static str,
    dir: TempDir,
    /// The URLs of the servers, in place of those of the documents.
    urls: Vec<String>,
    list: String,
    done: RefCell<Vec<&'static str>>,
}

impl Reader {
    fn of(test: &'static str, rig: &Rig) -> Self {
        let dir = TempDir::with_prefix("fletch-reader-").expect("scratch");
        let urls = rig.servers.iter().map(|s| s.url.clone()).collect();
        Reader { test, dir, urls, list: rig.list(), done: RefCell::default() }
    }

    /// Returns the command of an entry of [`HERE`] as its document has it, and notes that it is executed.
    fn shown(&self, entry: &str) -> Shown {
        let of_test = HERE.iter().filter(|(test, ..)| *test == self.test);
        let mut listed = of_test.filter(|(_, _, command)| *command == entry);
        let (_, document, command) = listed.next().unwrap_or_else(|| panic!("{entry} is not in HERE"));
        self.done.borrow_mut().push(command);
        let shown = commands(&read(document)).into_iter().find(|shown| is_entry(entry, shown));
        shown.unwrap_or_else(|| panic!("{document} does not show {entry}"))
    }

    fn put(&self, text: &str, values: &[(&str, &str)]) -> String {
        let named = values.iter().fold(text.to_owned(), |text, (name, value)| text.replace(name, value));
        let hosts = (1..).zip(&self.urls).map(|(n, url)| (format!("http://cache-{n}.example:7380"), url));
        hosts.fold(named, |text, (host, url)| text.replace(&host, url))
    }

    fn run(&self, command: &str, more: &[(&str, &str)]) -> (i32, String) {
        let variables = [&[("FLETCH_SERVER", self.list.as_str())], more].concat();
        let (code, printed) = run_as_reader(command, self.dir.path(), &variables);
        eprintln!("$ {command}\n{printed}(exit {code})");
        (code, printed)
    }

    /// Executes a command of the documents, with these values for its names. It must end with this exit
    /// code, and print what the document shows. Returns what it printed.
    fn does(&self, begin: &str, values: &[(&str, &str)], exit: i32) -> String {
        let shown = self.shown(begin);
        let command = self.put(&shown.text, values);
        let (code, printed) = self.run(&command, &[]);
        assert_eq!(code, exit, "{command}\n{printed}");
        if let Some(expected) = shown.expected {
            let expected: Vec<String> = expected.iter().map(|line| self.put(line, values)).collect();
            let expected_text = expected.join("\n");
            assert!(agrees(&expected, &printed), "{command} printed\n{printed}instead of\n{expected_text}");
        }
        printed
    }

    /// Executes a command that is no end by itself, until `done`. Returns the process.
    fn keeps(&self, begin: &str, values: &[(&str, &str)], done: impl Fn() -> bool) -> Running {
        let command = self.put(&self.shown(begin).text, values);
        let log = self.dir.path().join("daemon.log");
        let out = fs::File::create(&log).expect("log");
        let mut c = without_variables(Command::new("bash"));
        let bins = fletch_tests::bins::bin_dir();
        let path = format!("{}:{}", bins.display(), std::env::var("PATH").unwrap_or_default());
        c.args(["-c", &format!("exec {command}")]).current_dir(self.dir.path()).env("PATH", path);
        c.env("HOME", self.dir.path()).env("FLETCH_STATE_DIR", self.dir.path().join("reader-state"));
        c.stdin(Stdio::null()).stdout(out.try_clone().expect("log")).stderr(out);
        let mut process = Running::spawn(begin, &mut c);
        until(begin, Duration::from_secs(20), || {
            assert!(process.alive(), "{command} ended: {}", fs::read_to_string(&log).unwrap_or_default());
            done()
        });
        process
    }

    /// Executes all blocks `sh diagnose` of a runbook.
    fn diagnoses(&self, document: &str, variables: &[(&str, &str)]) {
        let all = commands(&read(document));
        let blocks: Vec<_> = all.iter().filter(|c| c.block.as_deref() == Some("sh diagnose")).collect();
        assert!(!blocks.is_empty());
        for block in blocks {
            let (code, printed) = self.run(&format!("set -eu\n{}", block.text), variables);
            assert_eq!(code, 0, "{document}:{}: {printed}", block.line);
        }
    }

    /// Checks that all commands of the test were executed.
    fn has_done_all(self) {
        let done = self.done.into_inner();
        let open: Vec<_> =
            HERE.iter().filter(|(test, _, command)| *test == self.test && !done.contains(command)).collect();
        assert!(open.is_empty(), "not executed: {open:?}");
    }
}

fn ask(name: &str, ranks: u32) -> StartJob {
    StartJob {
        name: name.parse().expect("name"),
        dataset: Some("photos".parse().expect("name")),
        version: None,
        root: None,
        layout: None,
        seed: Some(11),
        order: OrderKind::Strict,
        buckets: None,
        replay: None,
        plan: PlanSpec::default(),
        world: WorldSpec { ranks, batch: 4 * ranks, tail: Tail::Pad },
        visitation: Visitation::ExactlyOnce,
    }
}

/// Takes and acknowledges one lease of a rank.
async fn take(job: &JobHandle, rank: u32) {
    job.join(0, rank).await.expect("joined");
    let mut reader = job.reader(0, rank, 0);
    let Next::Batch(batch) = reader.next(4).await.expect("a lease") else { panic!("no samples") };
    job.ack(0, rank, &[batch.token.ack(BatchTimes::default())]).await.expect("acknowledged");
    job.held().release(0, rank, batch.token.lease);
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_are_moved_and_restored_as_the_documents_say() {
    if !have(&[Need::Etcd, Need::Prometheus]) {
        return;
    }
    let mut rig = Rig::start(&[&[], &[], &[]]);
    let reader = Reader::of(JOBS, &rig);
    let mut ranks = Vec::new();
    for at in 0..4 {
        ranks.push(rig.client(at % 3).declare(&ask("train-7", 4)).await.expect("declared"));
    }
    // All jobs move to one server, which is lost later.
    let home = (rig.at(&ranks[0].server()) + 1) % 3;
    let mut alone = Vec::new();
    for name in ["train-8", "train-9"] {
        alone.push(rig.client(0).declare(&ask(name, 1)).await.expect("declared"));
    }
    for job in [&ranks[0], &alone[0], &alone[1]] {
        if rig.at(&job.server()) != home {
            let names = [("JOB", job.info().name.as_str()), ("MEMBER", &id_of(home))];
            reader.does("fletch jobs move JOB --to MEMBER", &names, 0);
        }
    }
    let has_all = || {
        let text = rig.servers[home].text("/v1/jobs");
        ["train-7", "train-8", "train-9"].iter().all(|name| text.contains(name))
    };
    until("one server has all jobs", NEWS, has_all);
    let mut keepers: JoinSet<ClientError> = JoinSet::new();
    for (rank, job) in (0..).zip(&ranks) {
        take(job, rank).await;
        // The processes of the ranks 2 and 3 end.
        if rank < 2 {
            let job = job.clone();
            keepers.spawn(async move { job.keep_alive().await });
        }
    }
    ranks.truncate(2);
    for job in &alone {
        take(job, 0).await;
        fs::write(reader.dir.path().join("state"), job.state(0).await.expect("a state")).expect("written");
    }
    for (job, file) in alone.iter().zip(["state", "FILE"]) {
        fs::write(reader.dir.path().join(file), job.state(0).await.expect("a state")).expect("written");
    }
    rig.servers[home].kill();
    for dir in ["state", "cache"] {
        fs::remove_dir_all(rig.servers[home].place(dir)).expect("deleted");
    }
    let living = (home + 1) % 3;
    let listed = || reader.run("fletch jobs list", &[]);
    until("the jobs are listed as waiting", MOVE, || {
        let (code, text) = listed();
        code == 0 && text.contains("waits until ranks 2, 3 say") && text.matches("which is down").count() == 2
    });
    let prometheus = Prometheus::scrape(&rig.servers[living].url);
    let variables = [("FLETCH_SERVER", rig.servers[living].url.as_str()), ("PROMETHEUS", prometheus.url())];
    reader.diagnoses(JOB_WAITS, &variables);
    reader.does("fletch jobs lost train-7 --rank 3", &[], 0);
    reader.does("fletch jobs lost JOB --rank R", &[("JOB", "train-7"), ("R", "2")], 0);
    let values = [
        ("http://cache-1.example:7380", rig.servers[living].url.as_str()),
        ("ID", alone[0].info().id.as_str()),
        ("epochs/3", "epochs/0"),
    ];
    let moved = reader.does("curl --location-trusted …", &values, 0);
    assert!(moved.contains("\"acked\":4"), "{moved}");
    let values = [("JOB", "train-9"), ("FILE", "FILE")];
    let moved = reader.does("fletch jobs restore JOB --state FILE", &values, 0);
    assert!(moved.contains("epoch 0 goes on after 4 samples"), "{moved}");
    until("no job waits", MOVE, || !listed().1.contains("waits"));
    take(&alone[0], 0).await;
    take(&alone[1], 0).await;
    let shown = reader.does("fletch jobs show JOB", &[("JOB", "train-8")], 0);
    assert!(shown.contains("train-8"), "{shown}");
    reader.does("fletch jobs delete JOB", &[("JOB", "train-8")], 0);
    let told = reader.does("fletch cluster drain ID", &[("ID", &id_of(home))], 0);
    assert!(told.contains("cache-"), "{told}");
    reader.has_done_all();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_without_keys_is_recovered_as_the_documents_say() {
    if !have(&[Need::Etcd, Need::Prometheus]) {
        return;
    }
    let mut rig = Rig::start(&[&[], &["--limits-lease-ttl=77s"]]);
    let reader = Reader::of(ETCD, &rig);
    let prometheus = Prometheus::scrape(&rig.servers[0].url);
    let job = rig.client(0).declare(&ask("train", 1)).await.expect("declared");
    take(&job, 0).await;
    reader.does("fletch cluster check --server http://cache-1.example:7380", &[], 3);
    rig.etcd.lose(0);
    until("no server is in touch with its cluster", SILENCE, || {
        rig.servers.iter().all(|s| s.metric("fletch_cluster_coordinator_up ") == Some(0.0))
    });
    let variables = [("FLETCH_SERVER", rig.servers[0].url.as_str()), ("PROMETHEUS", prometheus.url())];
    reader.diagnoses(NO_COORDINATOR, &variables);
    reader.does("fletch cluster recover --dry-run --server http://cache-1.example:7380", &[], 0);
    reader.does("fletch cluster recover --server http://cache-1.example:7380", &[], 0);
    rig.all_up();
    take(&job, 0).await;
    reader.has_done_all();
}

#[test]
fn mounts_find_servers_as_the_documents_say() {
    if !have(&[Need::Etcd, Need::Fuse, Need::Root]) {
        return;
    }
    let rig = Rig::start(&[&[], &[], &[]]);
    let reader = Reader::of(MOUNTS, &rig);
    let dir = reader.dir.path();
    let at = |name: &str| {
        let path = dir.join(name);
        fs::create_dir_all(&path).expect("scratch");
        path
    };
    let (mount, url) = (at("mnt/photos"), rig.servers[1].url.clone());
    let (path, _) = &rig.set.data.files[0];
    let is_there = |dir: &Path| is_mounted(dir) && fs::read(dir.join(path)).is_ok();
    let ended = |mut process: Running| {
        process.signal(Signal::SIGTERM);
        assert!(process.wait(Duration::from_secs(25)).success());
    };
    let place = mount.display().to_string();
    for begin in [
        "fletch-mount photos /mnt/photos --server http://cache-1.example:7380, …",
        "fletch-mount photos /mnt/photos --server http://fletch.default.svc:7380",
    ] {
        let values = [("/mnt/photos", place.as_str()), ("http://fletch.default.svc:7380", url.as_str())];
        ended(reader.keeps(begin, &values, || is_there(&mount)));
        assert!(!is_mounted(&mount));
    }

    // The store of a node is asked by its socket.
    let cache = at("node-cache");
    let all = format!(
        "fletch-mount photos {place} --server {} --cache-dir {} --cache-free-floor 0 --cache-size SIZE",
        rig.list(),
        cache.display()
    );
    let values = [("fletch-mount --cache-size SIZE", all.as_str()), ("SIZE", "64MiB")];
    let owner = reader.keeps("fletch-mount --cache-size SIZE", &values, || is_there(&mount));
    let mut store = cache;
    for _ in 0..2 {
        let inside = fs::read_dir(&store).expect("the cache").map(|e| e.expect("entry").path());
        // Beside the stores lie the tables of the user's mounts.
        let is_store = |p: &std::path::PathBuf| p.is_dir() && !p.ends_with("tables-0");
        store = inside.into_iter().find(is_store).expect("a directory");
    }
    let state = reader.does(
        "curl --unix-socket DIR/node.sock http://localhost/node/v1/state",
        &[("DIR", &store.display().to_string())],
        0,
    );
    assert!(state.contains("\"pid\":"), "{state}");
    ended(owner);

    // All datasets of a node.
    let (node, ready) = (at("run/datasets"), dir.join("run/vision.ready"));
    let token = dir.join("vision.token");
    fs::write(&token, "token of a server that asks for none\n").expect("token");
    let values = [
        ("/run/fletch/vision/datasets", &*node.display().to_string()),
        ("/run/fletch/vision.ready", &*ready.display().to_string()),
        ("/etc/fletch/vision.token", &*token.display().to_string()),
        ("http://cache.example:7380", &*rig.servers[0].url),
    ];
    let begin = "fletch-mount --datasets /run/fletch/vision/datasets …";
    ended(
        reader.keeps(begin, &values, || ready.exists() && fs::read(node.join("photos").join(path)).is_ok()),
    );

    // The same, held by a keeper, which unmounts when both have ended.
    let (kept, socket) = (at("run/kept"), dir.join("keeper/socket"));
    let below = dir.canonicalize().expect("scratch").display().to_string();
    let values = [
        ("/run/fletch/.keeper/socket", &*socket.display().to_string()),
        ("/run/fletch/vision/datasets", &*kept.display().to_string()),
        ("/etc/fletch/vision.token", &*token.display().to_string()),
        ("http://cache.example:7380", &*rig.servers[0].url),
        ("/run/fletch", &*below),
    ];
    let begin = "fletch-mount --hold /run/fletch/.keeper/socket --hold-below /run/fletch";
    let keeper = reader.keeps(begin, &values, || socket.exists());
    let begin = "fletch-mount --keeper /run/fletch/.keeper/socket …";
    ended(reader.keeps(begin, &values, || fs::read(kept.join("photos").join(path)).is_ok()));
    assert!(kept.join("photos").is_symlink(), "the names stay");
    ended(keeper);
    assert!(!kept.join("photos").is_symlink());
    reader.has_done_all();
}

#[test]
fn datasets_and_servers_are_managed_as_the_documents_say() {
    if !have(&[Need::Etcd, Need::Torch]) {
        return;
    }
    let rig = Rig::start(&[&[], &[], &[]]);
    let reader = Reader::of(DATASETS, &rig);
    let (uri, tables) = (rig.set.data.dir.display().to_string(), rig.set.tables.display().to_string());
    let program = reader.put(&reader.shown("fletch.Client( …").text, &[]);
    let program = format!("import fletch\nclient = {program}\nassert client.datasets(), client\n");
    fletch_tests::bins::run(Installed::new().command().args(["-c", &program]));

    let replaced = format!("fletch register photos {uri} --tables {tables} --replace");
    reader.does("fletch register --replace", &[("fletch register --replace", &replaced)], 0);
    let photos = [("NAME[@TAG]", "photos@latest"), ("NAME", "photos")];
    reader.does("fletch warmup NAME[@TAG] --wait", &photos, 0);
    reader.does("fletch evict NAME", &photos, 0);
    reader.does("fletch refresh NAME", &photos, 0);
    reader.does("fletch seal NAME", &photos, 0);
    reader.does("fletch doctor SOURCE --tables TABLES", &[("SOURCE", &*uri), ("TABLES", &*tables)], 0);

    let token = "fletch-server token new --role peer --append tokens.toml --out peer.token";
    reader.does(token, &[], 0);
    let token = "fletch-server token new --tenant vision --domain research --role reader …";
    reader.does(token, &[("FILE", "tokens.toml"), ("--out token", "--out reader.token")], 0);
    let tokens = fs::read_to_string(reader.dir.path().join("tokens.toml")).expect("tokens");
    assert!(tokens.contains("role = \"peer\"") && tokens.contains("tenant = \"vision\""), "{tokens}");
    for file in ["peer.token", "reader.token"] {
        assert!(reader.dir.path().join(file).exists(), "{file}");
    }

    let socket = reader.dir.path().join(".fletch/s.sock");
    fs::create_dir(reader.dir.path().join(".fletch")).expect("scratch");
    let begin = "fletch-server --listen none --socket ~/.fletch/s.sock --idle 10m …";
    let mut own = reader.keeps(begin, &[], || socket.exists());
    let asked = format!("fletch status --server unix:{}", socket.display());
    until("the user's own server answers", NEWS, || reader.run(&asked, &[]).0 == 0);
    own.signal(Signal::SIGTERM);
    assert!(own.wait(Duration::from_secs(12)).success());
    reader.has_done_all();
}
