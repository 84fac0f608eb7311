//! I2: no sample is missing after SIGKILLs of the server and of consumers.
//!
//! Every repeated sample was held by a killed process. The test kills at random moments, and exactly between
//! a durable grant and the end of its answer. Then it joins the consumption logs with the ledger. Each
//! consumer is a process. It writes its consumption log durably before it acknowledges. A gate limits the
//! leases of each consumer between two kills, so that the epoch is in progress at every kill.

use fletch_api::{
    Ack, Code, LeaseRequest, Loader, OrderKind, PlanSpec, StartJob, Visitation, WorldSpec, routes,
};
use fletch_client::{
    Client, ClientConfig, Endpoint, FirstAnswer,
    epochs::{JobHandle, LeaseBatch, Next},
};
use fletch_core::{
    Hash,
    delivery::{
        Event, Request,
        consumption_log::{self, ConsumptionLog},
        ledger::Ledger,
    },
    plan::Tail,
};
use fletch_tests::{
    bins::{Running, command},
    fixture::Site,
    readers::Data,
    require::{Need, have},
    syncs::Syncs,
};
use nix::sys::signal::Signal;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{ErrorKind, Read as _, Write as _},
    os::unix::{net::UnixStream, process::parent_id},
    path::{Path, PathBuf},
    process::{ChildStdin, Command, Stdio},
    time::{Duration, Instant},
};
use tokio::{task::block_in_place, time::sleep};

const CHILD: &str = "FLETCH_TEST_CONSUMER";
const WANT: u32 = 8;
const RANKS: u32 = 2;
/// The leases that each consumer may take between two kills.
const LEASES: usize = 3;
/// The time for which a thread is held after a grant is durable. The test kills the server within it.
const HOLD: Duration = Duration::from_millis(400);

fn client(socket: &Path) -> Client {
    // The socket is where it was after a restart.
    let endpoint: Endpoint = format!("unix:{}", socket.display()).parse().expect("socket");
    let config = ClientConfig {
        io_timeout: Duration::from_secs(10),
        // A consumer that starts while the server restarts waits for it, as its predecessor did.
        first_answer: FirstAnswer::received(),
        ..ClientConfig::new(endpoint, "loader")
    };
    Client::new(config).expect("client")
}

/// Creates the consumption log of a consumer.
fn notes_file(path: &Path, job: &JobHandle) -> File {
    let mut file = File::create(path).expect("file");
    writeln!(file, "{}", consumption_log::head(job.info().root, 0)).expect("written");
    file.sync_all().expect("durable");
    file
}

/// Appends a consumed batch to the log, durably. The consumer acknowledges it afterwards.
fn note(file: &mut File, b: &LeaseBatch) {
    file.write_all(b.log_records().as_bytes()).expect("written");
    file.sync_data().expect("durable");
}

/// Acknowledges a batch, and retries until the server answers. Returns whether the lease was still valid.
async fn acknowledge(job: &JobHandle, b: &LeaseBatch) -> bool {
    let ack = Ack { lease: b.token.lease, upto: b.token.entries, batches: Vec::new() };
    loop {
        match job.ack(0, b.token.rank, std::slice::from_ref(&ack)).await {
            Ok(_) => return true,
            Err(e) if e.code() == Some(Code::LeaseGone) => return false,
            Err(e) if e.is_unreachable() || e.code().is_some_and(Code::retryable) => {}
            Err(e) => panic!("{e}"),
        }
    }
}

/// A consumer: it takes one lease for each byte of its stdin, and all remaining leases after stdin ends.
async fn consume(job: JobHandle, rank: u32, life: u32, path: &Path) {
    let mut file = notes_file(path, &job);
    // Three of four receive up to three leases ahead of what they consume.
    let mut reader = job.reader(0, rank, life).prefetch(life as usize % 4).patience(Duration::from_secs(60));
    let mut pass = true;
    loop {
        if pass {
            // The end of it is a pass for everything.
            let passes = std::io::stdin().read(&mut [0]).expect("stdin");
            assert!(passes <= 1);
        }
        match reader.next(WANT).await.expect("a lease, sooner or later") {
            Next::Batch(b) => {
                pass = true;
                note(&mut file, &b);
                if !acknowledge(&job, &b).await {
                    writeln!(file, "# late {}", b.token.lease).expect("written");
                }
                job.held().release(0, rank, b.token.lease);
            }
            Next::Full | Next::Last => {
                pass = false;
                sleep(Duration::from_millis(50)).await;
            }
            Next::Done => return,
        }
    }
}

/// The consumer process that [`killed`] starts. As a test it checks only [`late`].
#[tokio::test]
async fn consumer() {
    let Ok(spec) = std::env::var(CHILD) else {
        assert_eq!(late("# late 7\n# late 12\n# lat"), [7, 12].into());
        return;
    };
    let words: Vec<&str> = spec.split(' ').collect();
    let [rank, life, job, socket, path] = words[..] else { panic!("{spec}") };
    let life = life.parse().expect("life");
    let job = client(Path::new(socket)).job(job).await.expect("the job");
    let job = job.with_loader(loader_of(life, parent_id()));
    consume(job, rank.parse().expect("rank"), life, Path::new(path)).await;
}

/// Returns the name of a consumer as its rank. `test` is the number of the process that runs the test.
///
/// The test process reads under it, too, as a worker of the consumer.
fn loader_of(life: u32, test: u32) -> Loader {
    Loader {
        id: format!("{life:032x}"),
        host: "consumers".to_owned(),
        pid: test,
        since_ms: u64::from(life),
        take_over: false,
        leave: false,
    }
}

/// Returns the leases that were acknowledged too late, as a consumer's log says.
fn late(text: &str) -> BTreeSet<u64> {
    text.lines().filter_map(|l| l.strip_prefix("# late ")).map(|l| l.parse().expect("a lease")).collect()
}

/// A running consumer.
struct Consumer {
    life: u32,
    process: Running,
    gate: ChildStdin,
}

/// One job, its server and its consumers.
struct Trial<'a> {
    site: &'a mut Site,
    job: JobHandle,
    notes: PathBuf,
    /// The number of consumers that were started. Each one is a worker with this number.
    lives: u32,
    dead: BTreeSet<u32>,
    consumers: Vec<Consumer>,
}

/// A lease, as the ledger records it.
#[derive(Debug, Clone, Default)]
struct LedgerLease {
    worker: u32,
    entries: Vec<u32>,
    acked: u32,
    expired: bool,
}

/// Returns the leases of a ledger by number.
fn leases_of(ledger: &Ledger) -> BTreeMap<u64, LedgerLease> {
    let mut leases: BTreeMap<u64, LedgerLease> = BTreeMap::new();
    for e in &ledger.events {
        match e {
            Event::Grant { lease, request, entries } => {
                let new = LedgerLease {
                    worker: request.worker,
                    entries: entries.clone(),
                    ..LedgerLease::default()
                };
                assert!(leases.insert(*lease, new).is_none());
            }
            Event::Ack { lease, upto } => leases.get_mut(lease).expect("granted").acked = *upto,
            Event::Expire { lease } => leases.get_mut(lease).expect("granted").expired = true,
            _ => {}
        }
    }
    leases
}

impl Trial<'_> {
    fn file(&self, life: u32) -> PathBuf {
        self.notes.join(life.to_string())
    }

    fn begin(&mut self, rank: u32) -> Consumer {
        self.lives += 1;
        let life = self.lives;
        let (id, socket, file) = (&self.job.info().id, self.site.socket(), self.file(life));
        let mut c = Command::new(std::env::current_exe().expect("this program"));
        c.args(["--exact", "consumer", "--nocapture", "--test-threads=1"])
            .env(CHILD, format!("{rank} {life} {id} {} {}", socket.display(), file.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::null());
        let mut process = Running::spawn(&format!("consumer {life}"), &mut c);
        let gate = process.stdin();
        Consumer { life, process, gate }
    }

    /// Returns the path of the epoch's ledger.
    fn on_disk(&self) -> PathBuf {
        self.site.place("state").join("jobs").join(&self.job.info().id).join("epoch-0.ledger")
    }

    fn read(&self) -> Ledger {
        Ledger::read(&fs::read(self.on_disk()).expect("ledger")).expect("a ledger")
    }

    /// Returns the number of entries in open leases. Without a ledger it is 0, and also for an empty file: a
    /// kill between its creation and the first write leaves one, and no lease was granted before that write.
    fn held(&self) -> usize {
        let open = |t: &&LedgerLease| !t.expired && (t.acked as usize) < t.entries.len();
        match fs::metadata(self.on_disk()) {
            Ok(meta) if meta.len() > 0 => {}
            Ok(_) => return 0,
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::NotFound, "{e}");
                return 0;
            }
        }
        leases_of(&self.read()).values().filter(open).map(|t| t.entries.len() - t.acked as usize).sum()
    }

    /// Kills a consumer: at any moment, or after it logged a batch that it has not acknowledged.
    fn kill_consumer(&mut self, rank: u32, unacknowledged: bool) {
        let new = self.begin(rank);
        let mut old = std::mem::replace(&mut self.consumers[rank as usize], new);
        let life = old.life;
        if unacknowledged {
            let len = || fs::metadata(self.file(life)).map_or(0, |m| m.len());
            let (before, until) = (len(), Instant::now() + Duration::from_secs(60));
            old.gate.write_all(&[0; LEASES]).expect("it lives");
            while len() == before {
                assert!(Instant::now() < until, "it consumes nothing");
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        old.process.signal(Signal::SIGKILL);
        let status = old.process.wait(Duration::from_secs(20));
        assert!(!status.success(), "it was under way");
        self.dead.insert(life);
    }

    /// Kills the server when a grant is durable and before its answer ends.
    ///
    /// Returns the lease, its worker and its entries; and whether the answer ended nevertheless, because this
    /// process was delayed for longer than the server's thread was held.
    fn kill_between(&mut self, rank: u32) -> ((u64, u32, Vec<u32>), bool) {
        self.lives += 1;
        let ask =
            LeaseRequest { rank, worker: self.lives, sequence: 1, want: WANT, ..LeaseRequest::default() };
        let request = Request { rank, worker: ask.worker, sequence: 1 };
        let granted = |ledger: &Ledger| {
            ledger.events.iter().find_map(|e| match e {
                Event::Grant { lease, request: r, entries } if *r == request => {
                    Some((*lease, ask.worker, entries.clone()))
                }
                _ => None,
            })
        };
        let ledger = self.on_disk();
        let mut syncs = Syncs::hold(self.site.pid(), self.notes.with_extension("strace"), HOLD);
        let body = serde_json::to_string(&ask).expect("json");
        let path = routes::epoch(&self.job.info().id, 0, "leases");
        let head = format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n");
        let mut answer = UnixStream::connect(self.site.socket()).expect("the server");
        write!(answer, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).expect("asked");
        // The ledger is written by one thread. At the end of a sync it is held, so all that the file has is
        // durable and nobody knows. Of the consumers' records there may be such moments first.
        loop {
            syncs.next(&ledger, Duration::from_secs(60));
            if granted(&self.read()).is_some() {
                break;
            }
        }
        self.site.kill();
        let mut bytes = Vec::new();
        match answer.read_to_end(&mut bytes) {
            Ok(_) => {}
            Err(e) => assert_eq!(e.kind(), ErrorKind::ConnectionReset, "{e}"),
        }
        // The last chunk of the answer follows its end frame.
        (granted(&self.read()).expect("the grant is durable"), bytes.ends_with(b"0\r\n\r\n"))
    }

    /// Repeats the request after the restart: gets the same lease, and consumes it.
    async fn ask_again(&self, rank: u32, (lease, worker, entries): &(u64, u32, Vec<u32>)) {
        let life = self.consumers[rank as usize].life;
        let job = self.job.clone().with_loader(loader_of(life, std::process::id()));
        let mut reader = job.reader(0, rank, *worker).after_sequence(0).patience(Duration::from_secs(60));
        let Next::Batch(b) = reader.next(WANT).await.expect("the lease") else { panic!("the lease") };
        assert_eq!(b.token.lease, *lease, "the grant survived");
        assert_eq!(b.samples.iter().map(|s| s.entry).collect::<Vec<_>>(), *entries);
        let mut file = notes_file(&self.file(*worker), &self.job);
        note(&mut file, &b);
        assert!(acknowledge(&job, &b).await, "it lived on for a whole ttl");
        job.held().release(0, rank, b.token.lease);
    }

    /// Returns the log of each consumer. A consumer that was killed before its first line has none.
    fn all_notes(&self) -> BTreeMap<u32, (ConsumptionLog, BTreeSet<u64>)> {
        let read = |life| {
            let text = fs::read_to_string(self.file(life)).ok().filter(|t| t.contains('\n'))?;
            Some((life, (ConsumptionLog::parse(&text).expect("notes"), late(&text))))
        };
        (1..=self.lives).filter_map(read).collect()
    }
}

/// The receipt and ledger with which the logs of all consumers are compared: the server's, and saved copies.
struct Proof {
    job: String,
    server: String,
    saved: [PathBuf; 2],
    files: Vec<PathBuf>,
}

impl Proof {
    async fn of(t: &Trial<'_>, files: &[PathBuf]) -> Self {
        let saved = ["receipt", "ledger"].map(|what| t.notes.with_extension(what));
        let receipt = t.job.receipt(0).await.expect("finished");
        fs::write(&saved[0], serde_json::to_vec(&receipt).expect("json")).expect("saved");
        fs::write(&saved[1], t.job.ledger(0).await.expect("ledger")).expect("saved");
        let (job, server) = (t.job.info().name.to_string(), t.site.url.clone());
        Proof { job, server, saved, files: files.to_vec() }
    }

    /// Runs `fletch receipt verify` against the server and the saved copies. The reports must be equal.
    fn verify(&self, code: i32) -> Value {
        let served = self.said(&["--epoch", "0", "--job", &self.job], code);
        assert_eq!(served, self.of_saved(code));
        served
    }

    /// Runs `fletch receipt verify` against the saved copies.
    fn of_saved(&self, code: i32) -> Value {
        let [receipt, ledger] = self.saved.each_ref().map(|p| p.to_str().expect("UTF-8"));
        self.said(&["--receipt", receipt, "--ledger", ledger, "--dataset", "d"], code)
    }

    fn said(&self, against: &[&str], code: i32) -> Value {
        let mut c = command("fletch");
        c.args(["receipt", "verify", "--json", "--server", &self.server]).args(against).args(&self.files);
        let out = c.output().expect("fletch");
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        let said: Value = serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert_eq!(out.status.code(), Some(code), "{text}{said}");
        said
    }
}

/// Returns the number of logged samples that were not acknowledged.
fn lost_notes(
    all: &BTreeMap<u32, (ConsumptionLog, BTreeSet<u64>)>,
    leases: &BTreeMap<u64, LedgerLease>,
) -> u64 {
    let places = all.values().flat_map(|(notes, _)| notes.records.iter().filter_map(|(_, n)| n.at));
    places.filter(|(id, place)| *place >= leases[id].acked).count() as u64
}

async fn killed(site: &mut Site, order: OrderKind, rounds: u32, samples: u64, seed: u64) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let exactly = have(&[Need::Strace]);
    let ask = StartJob {
        name: format!("killed-{}", order.as_str()).parse().expect("name"),
        dataset: Some("d".parse().expect("name")),
        version: None,
        root: None,
        layout: None,
        seed: Some(seed),
        order,
        buckets: None,
        replay: None,
        plan: PlanSpec::default(),
        world: WorldSpec { ranks: RANKS, batch: RANKS * WANT, tail: Tail::Drop },
        visitation: Visitation::ExactlyOnce,
    };
    let job = client(&site.socket()).declare(&ask).await.expect("declared");
    let notes = site.place(&format!("notes-{}", order.as_str()));
    let (dead, consumers) = (BTreeSet::new(), Vec::new());
    let mut t = Trial { site, job, notes, lives: 0, dead, consumers };
    t.consumers = (0..RANKS).map(|rank| t.begin(rank)).collect();
    let (mut servers, mut between, mut held, mut more) = (0, 0, 0, 0);
    for round in 0..rounds {
        for c in &mut t.consumers {
            c.gate.write_all(&[0; LEASES]).expect("it lives");
        }
        sleep(Duration::from_millis(rng.random_range(0..60))).await;
        let rank = rng.random_range(0..RANKS);
        match round % 3 {
            1 => block_in_place(|| t.kill_consumer(rank, round % 2 == 0)),
            2 if exactly => loop {
                let (lease, has_ended) = block_in_place(|| t.kill_between(rank));
                held += t.held();
                block_in_place(|| t.site.restart());
                if !has_ended && between % 2 == 0 {
                    t.ask_again(rank, &lease).await;
                } else {
                    // Whoever asked died too.
                    t.dead.insert(lease.1);
                }
                if !has_ended {
                    between += 1;
                    break;
                }
                // A kill as any other.
                more += 1;
                assert!(more < 20, "no kill is in time");
            },
            _ => {
                block_in_place(|| t.site.kill());
                servers += 1;
                held += t.held();
                block_in_place(|| t.site.restart());
            }
        }
        assert!(t.job.receipt(0).await.is_err(), "the epoch was under way");
    }
    for c in std::mem::take(&mut t.consumers) {
        let Consumer { mut process, gate, .. } = c;
        drop(gate);
        let status = block_in_place(|| process.wait(Duration::from_secs(240)));
        assert!(status.success(), "{}: {status}", process.name);
    }

    let receipt = t.job.receipt(0).await.expect("finished");
    let leases = leases_of(&Ledger::read(&t.job.ledger(0).await.expect("ledger")).expect("a ledger"));
    let mut granted: BTreeMap<u32, u64> = BTreeMap::new();
    leases.values().flat_map(|t| &t.entries).for_each(|e| *granted.entry(*e).or_default() += 1);
    let again: u64 = granted.values().map(|n| n - 1).sum();
    assert_eq!(again, receipt.receipt.redelivered, "all of them are counted");

    let (mut once, mut times) = (BTreeMap::new(), BTreeMap::<u32, u64>::new());
    let mut lost: BTreeMap<u32, BTreeSet<u64>> = BTreeMap::new();
    let mut too_late = 0;
    let all_notes = t.all_notes();
    for (&life, (notes, late)) in &all_notes {
        too_late += late.len();
        for (_, n) in &notes.records {
            let (id, place) = n.at.expect("written");
            let lease = &leases[&id];
            assert_eq!(lease.worker, life, "it was granted to it");
            let entry = lease.entries[place as usize];
            *times.entry(entry).or_default() += 1;
            if place < lease.acked {
                assert!(once.insert(entry, n.delivery).is_none(), "acknowledged twice");
            } else {
                assert!(lease.expired, "lease {id} was neither acknowledged nor granted again");
                assert!(t.dead.contains(&life) || late.contains(&id), "{life} lives and was in time");
                lost.entry(life).or_default().insert(id);
            }
        }
    }
    assert!(receipt.receipt.dropped.is_empty(), "whole batches: {:?}", receipt.receipt.dropped);
    assert_eq!(once.len() as u64, receipt.receipt.delivered, "0 missing");
    assert_eq!(once.len() + receipt.receipt.dropped.len(), usize::try_from(samples).expect("few"));
    let mut windows = lost.iter().filter(|(life, _)| t.dead.contains(life));
    assert!(windows.all(|(_, leases)| leases.len() <= 1), "one window a kill: {lost:?}");
    // Who lives is late only where a server was gone for as long as a lease lives.
    let windows = ((servers + more) * RANKS) as usize;
    assert!(too_late <= windows, "{too_late} acks too late at {} kills of the server", servers + more);
    let twice: u64 = times.values().map(|n| n - 1).sum();
    let doubled = leases.iter().filter(|(id, _)| lost.values().any(|l| l.contains(id)));
    let unacked: u64 = doubled.map(|(_, t)| (t.entries.len() - t.acked as usize) as u64).sum();
    assert!(twice <= unacked && twice <= receipt.receipt.redelivered, "{twice} twice, {unacked} unacked");

    // The command says the same of the files, and names what is tampered with.
    let files: Vec<PathBuf> = all_notes.keys().map(|life| t.file(*life)).collect();
    let proof = Proof::of(&t, &files).await;
    let said = proof.verify(0);
    assert_eq!(said["left_out"].as_u64(), Some(lost_notes(&all_notes, &leases)), "{said}");
    let lives = files.iter().find(|f| fs::read_to_string(f).is_ok_and(|t| t.lines().count() > 4 * LEASES));
    let lives = lives.expect("somebody lived");
    let text = fs::read_to_string(lives).expect("text");
    // Its first lease was acknowledged before it asked for the second.
    let note = text.lines().nth(1).expect("a note");
    let hash = note.split(' ').nth(2).expect("a hash");
    for (what, tampered) in [
        ("missing", text.replace(note, "# torn out")),
        ("doubled", format!("{text}{note}\n")),
        ("altered", text.replace(note, &note.replace(hash, &Hash::of(b"altered").to_string()))),
    ] {
        fs::write(lives, tampered).expect("tampered");
        let said = proof.verify(1);
        let first = &said["differs"][0];
        assert_eq!(first["what"].as_str(), Some(what), "{said}");
        assert!(first["path"].as_str().is_some_and(|p| p.split('/').count() == 2), "{said}");
    }
    // A sample that the server never delivered, and nobody misses: the plan does, whether the server says so
    // or not.
    fs::write(lives, text.replace(note, "# never came")).expect("nobody wrote it down");
    let (_, first) = ConsumptionLog::parse(&text).expect("notes").records[0];
    let (id, place) = first.at.expect("written");
    for dropped in [vec![leases[&id].entries[place as usize]], vec![]] {
        let mut without = receipt.clone();
        without.receipt.value.remove(without.receipt.root, &first.delivery);
        without.receipt.delivered -= 1;
        without.receipt.dropped = dropped;
        fs::write(&proof.saved[0], serde_json::to_vec(&without).expect("json")).expect("saved");
        let said = proof.of_saved(1);
        assert_eq!(said["differs"].as_array().map(Vec::len), Some(1), "{said}");
        assert_eq!(said["differs"][0]["what"], "receipt", "{said}");
    }
    fs::write(lives, text).expect("as it was");
    println!(
        "{}, seed {seed}: {} kills: {} of the server, {between} of it between grant and end, {} of \
         consumers; {} samples, 0 missing, {held} entries held at kills of the server, {again} granted \
         again, {twice} consumed twice, {too_late} acks too late",
        order.as_str(),
        rounds + more,
        servers + more,
        rounds - servers - between,
        once.len(),
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn i2_nothing_is_missing_and_what_came_twice_is_counted_whoever_is_killed() {
    let rounds = if std::env::var_os("FLETCH_SOAK").is_some() { 200 } else { 20 };
    let samples = u64::from(rounds) * 60;
    let data = Data::new(31, samples, 3_000);
    let more =
        ["--memory", "64MiB", "--cache-size", "64MiB", "--cache-free-floor", "0", "--limits-lease-ttl", "3s"];
    let mut site = Site::start(&more);
    let root = site.publish("d", &data.dir);
    println!("root {root}");
    let seed = rand::random();
    for order in [OrderKind::Strict, OrderKind::Substitute] {
        killed(&mut site, order, rounds / 2, samples, seed).await;
    }
}
