//! Training scripts in a cluster whose servers are lost for good, with their disks: a script that is started
//! again goes on from its own state, and a loop that waits says so and ends.

use fletch_tests::bins::command;
use fletch_tests::cluster::{ClusterServer, EtcdCluster};
use fletch_tests::cluster_data::ClusterData;
use fletch_tests::python::Installed;
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The samples of the dataset.
const SAMPLES: usize = 96;
/// The job of the scripts.
const JOB: &str = "train";

/// A script as users write them: it loads its last state if there is one, trains, and saves a state after
/// some steps. Then it writes `saved`, and waits at the next step until the test has ended its server.
const SCRIPT: &str = r#"
import logging, os, sys, time
import torch
from fletch import Client, FletchError
from fletch.torch import DataLoader, EpochDataset

servers, place, settings = sys.argv[1], sys.argv[2], eval(sys.argv[3])
at = lambda name: os.path.join(place, name)
logging.basicConfig(filename=at("log"), level=logging.WARNING)

def number(sample):
    return torch.tensor(sample.number)

def note(name, numbers):
    with open(at(name), "a") as file:
        file.writelines(f"{n}\n" for n in numbers)

state = torch.load(at("state")) if os.path.exists(at("state")) else None
is_late = settings.pop("is_late", False)
data = EpochDataset(
    Client(servers, timeout=5.0), "set", job="train", batch_size=4, transform=number, seed=7,
    state=None if is_late else state, **settings
)
if is_late:
    data.load_state_dict(state)

def batches():
    try:
        yield from DataLoader(data)
    except FletchError:
        note("stalled", [int(data.stats()["stalled_seconds"])])
        raise

pending = []
for step, batch in enumerate(batches()):
    pending += batch.tolist()
    if state is None and step == 4:
        saved = data.state_dict()
        torch.save(saved, at("state.new"))
        with open(at("epoch.state"), "wb") as file:
            file.write(saved["state"])
        os.replace(at("state.new"), at("state"))
        note("consumed", pending)
        pending = []
    if state is None and step == 6:
        note("saved", [step])
        while not os.path.exists(at("go")):
            time.sleep(0.05)
note("consumed", pending)
stats = data.stats()
note("done", [stats["stalled_seconds"]])
"#;

/// A script of one of two ranks that nobody watches. It loads no state and saves none.
const RANK_SCRIPT: &str = r#"
import logging, os, sys, time
import torch
from fletch import Client
from fletch.torch import DataLoader, EpochDataset

servers, place, settings = sys.argv[1], sys.argv[2], eval(sys.argv[3])
rank, workers = settings.pop("rank"), settings.pop("workers")
is_plain = settings.pop("is_plain", False)
at = lambda name: os.path.join(place, f"{name}-{rank}")
logging.basicConfig(filename=at("log"), level=logging.INFO)

def number(sample):
    return torch.tensor(sample.number)

def note(name, numbers):
    with open(at(name), "a") as file:
        file.writelines(f"{n}\n" for n in numbers)

data = EpochDataset(
    Client(servers, timeout=5.0), "set", job="train", batch_size=4, transform=number, seed=7,
    rank=rank, ranks=2, **settings
)
for epoch in range(2):
    data.set_epoch(epoch)
    # A loop over the dataset itself gets one sample at a time.
    batches = (item.reshape(1) for item in data) if is_plain else DataLoader(data, num_workers=workers)
    done = 0
    for batch in batches:
        note(f"consumed-{epoch}", batch.tolist())
        done += len(batch)
        if done == 16:
            note("reached", [epoch])
        time.sleep(0.04 * len(batch))
    stats = data.stats()
    note("redelivered", [stats["redelivered"]])
"#;

/// Servers of a cluster that know a dataset, and a place for the files of a script.
struct Stage {
    servers: Vec<ClusterServer>,
    place: PathBuf,
    python: Installed,
    _etcd: EtcdCluster,
    _set: ClusterData,
}

impl Stage {
    fn new() -> Self {
        let set = ClusterData::new(5, SAMPLES as u64);
        let place = set.scratch.path().join("place");
        fs::create_dir(&place).expect("a directory");
        let etcd = EtcdCluster::start(1);
        let servers = Vec::from(set.servers::<2>(&etcd, &[], None));
        Stage { servers, place, python: Installed::new(), _etcd: etcd, _set: set }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.place.join(name)
    }

    /// Starts the script with these settings of its dataset.
    fn script(&self, settings: &str) -> Script {
        self.start(SCRIPT, settings)
    }

    /// Starts a script with these settings.
    fn start(&self, script: &str, settings: &str) -> Script {
        let servers: Vec<&str> = self.servers.iter().map(|s| s.url.as_str()).collect();
        let mut python: Command = self.python.command();
        python.args(["-c", script, &servers.join(",")]).arg(&self.place).arg(settings);
        Script(python.stderr(Stdio::piped()).spawn().expect("python starts"))
    }

    /// Kills the server of the job, and deletes all that it had.
    fn lose_server(&mut self) {
        let has_job = |server: &ClusterServer| server.text("/v1/jobs").contains(JOB);
        let owner = self.servers.iter().position(has_job).expect("a server has the job");
        let mut lost = self.servers.remove(owner);
        lost.kill();
        for dir in ["state", "cache"] {
            fs::remove_dir_all(lost.place(dir)).expect("deleted");
        }
    }

    /// Runs `fletch jobs` at the server that is left. Returns the exit code, and what was printed.
    fn jobs(&self, words: &[&str]) -> (Option<i32>, String) {
        let mut c = command("fletch");
        let out = c.arg("jobs").args(words).args(["--server", &self.servers[0].url]).output();
        let out = out.expect("fletch runs");
        let text = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        (out.status.code(), text.concat())
    }

    fn numbers(&self, name: &str) -> Vec<usize> {
        let text = fs::read_to_string(self.at(name)).unwrap_or_default();
        text.lines().map(|line| line.parse().expect("a number")).collect()
    }
}

/// A script that is killed when the test ends.
struct Script(Child);

impl Script {
    /// Waits for its end. Returns whether it succeeded, and its standard error.
    fn end(mut self) -> (bool, String) {
        let out = std::mem::replace(&mut self.0, Command::new("true").spawn().expect("spawned"));
        let out = out.wait_with_output().expect("it ends");
        (out.status.success(), String::from_utf8_lossy(&out.stderr).into_owned())
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ended = self.0.kill();
        drop(self.0.wait());
    }
}

fn log(place: &Path) -> String {
    fs::read_to_string(place.join("log")).unwrap_or_default()
}

#[test]
fn a_script_that_is_started_again_moves_its_job_by_its_own_state() {
    if !have(&[Need::Etcd, Need::Torch]) {
        return;
    }
    // Trainers load the state after they have made the dataset.
    for settings in ["{}", "{'is_late': True}"] {
        let mut stage = Stage::new();
        let first = stage.script("{}");
        until("a state is saved", Duration::from_secs(60), || stage.at("saved").exists());
        drop(first);
        stage.lose_server();
        let began = Instant::now();
        let (is_done, error) = stage.script(settings).end();
        assert!(is_done, "{error}\n{}", log(&stage.place));
        let mut consumed = stage.numbers("consumed");
        consumed.sort_unstable();
        assert_eq!(consumed, (0..SAMPLES).collect::<Vec<_>>(), "each sample once, counted from the state");
        assert!(log(&stage.place).contains("the state moved the job"), "{}", log(&stage.place));
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    }
}

#[test]
fn an_operator_finds_a_job_whose_server_is_lost_and_restores_it() {
    if !have(&[Need::Etcd, Need::Torch]) {
        return;
    }
    let mut stage = Stage::new();
    let first = stage.script("{}");
    until("a state is saved", Duration::from_secs(60), || stage.at("saved").exists());
    let state = stage.at("epoch.state").display().to_string();
    let (code, text) = stage.jobs(&["restore", JOB, "--state", &state]);
    assert!(code == Some(1) && text.contains("is served") && text.contains("--replace"), "{text}");
    drop(first);
    stage.lose_server();
    until("the job is listed as one that waits", Duration::from_secs(20), || {
        let (code, text) = stage.jobs(&["list"]);
        code == Some(0) && text.contains("which is down") && text.contains("fletch jobs restore JOB")
    });
    let (code, text) = stage.jobs(&["show", JOB]);
    assert!(code == Some(4) && text.contains("job train waits for "), "{text}");
    let (code, text) = stage.jobs(&["restore", JOB, "--state", &stage.at("log").display().to_string()]);
    assert!(code == Some(1) && text.contains("is no state"), "{text}");
    let (code, text) = stage.jobs(&["restore", JOB, "--state", &state]);
    assert!(code == Some(0) && text.contains("epoch 0 goes on after 20 samples"), "{text}");
    let (code, text) = stage.jobs(&["list"]);
    assert!(code == Some(0) && !text.contains("waits for"), "{text}");
    let (is_done, error) = stage.script("{}").end();
    assert!(is_done, "{error}\n{}", log(&stage.place));
    let mut consumed = stage.numbers("consumed");
    consumed.sort_unstable();
    assert_eq!(consumed, (0..SAMPLES).collect::<Vec<_>>(), "each sample once, counted from the state");
    let (code, text) = stage.jobs(&["delete", JOB]);
    assert_eq!(code, Some(0), "{text}");
}

#[test]
fn a_loop_whose_server_is_lost_says_so_and_ends_after_server_wait() {
    if !have(&[Need::Etcd, Need::Torch]) {
        return;
    }
    let mut stage = Stage::new();
    let waiting = stage.script("{'server_wait': 12}");
    until("a state is saved", Duration::from_secs(60), || stage.at("saved").exists());
    // Nobody is left to go on with the job.
    stage.servers.iter_mut().for_each(|server| server.kill());
    fs::write(stage.at("go"), "").expect("written");
    let began = Instant::now();
    let (is_done, error) = waiting.end();
    assert!(!is_done && began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    for part in ["fletch.errors.Unavailable", "server_wait"] {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
    assert!(log(&stage.place).contains("waits for the server (at most 12 s)"), "{}", log(&stage.place));
    assert!(stage.numbers("stalled")[0] >= 12, "{:?}", stage.numbers("stalled"));
}

/// Two ranks lose their server and its disks in mid-epoch. One of them has workers, the other one has also no
/// loader. Each sample is consumed once, and nobody does anything.
#[test]
fn two_ranks_that_nobody_watches_go_on_at_another_server() {
    if !have(&[Need::Etcd, Need::Torch]) {
        return;
    }
    for order in ["substitute", "strict"] {
        let mut stage = Stage::new();
        let settings = |of: &str| format!("{{'order': '{order}', {of}}}");
        let other = if order == "strict" { "'is_plain': True" } else { "'is_plain': False" };
        let ranks = [
            stage.start(RANK_SCRIPT, &settings("'rank': 0, 'workers': 2")),
            stage.start(RANK_SCRIPT, &settings(&format!("'rank': 1, 'workers': 0, {other}"))),
        ];
        let reached =
            |epoch: usize| (0..2).all(|rank| stage.numbers(&format!("reached-{rank}")).contains(&epoch));
        until("both ranks are in the middle of the epoch", Duration::from_secs(60), || reached(0));
        stage.lose_server();
        let ended = ranks.map(Script::end);
        for (rank, (is_done, error)) in ended.iter().enumerate() {
            let log = fs::read_to_string(stage.at(&format!("log-{rank}"))).unwrap_or_default();
            assert!(*is_done, "{order}, rank {rank}: {error}\n{log}");
        }
        for epoch in 0..2 {
            let of_rank = |rank| stage.numbers(&format!("consumed-{epoch}-{rank}"));
            let (zero, one) = (of_rank(0), of_rank(1));
            assert_eq!(zero.len(), one.len(), "{order}: both make the same number of steps");
            let mut all = [zero, one].concat();
            all.sort_unstable();
            assert_eq!(all, (0..SAMPLES).collect::<Vec<_>>(), "{order}, epoch {epoch}: each sample once");
        }
        for rank in 0..2 {
            assert_eq!(stage.numbers(&format!("redelivered-{rank}")), [0, 0], "{order}, rank {rank}");
        }
    }
}
