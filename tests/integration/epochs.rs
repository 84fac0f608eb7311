//! I2: server and consumers are killed at random moments; joined with what consumers wrote down, the ledger says
//! that nothing is missing, and that what came twice was held by somebody who died.

use fletch_api::{BatchTimes, OrderKind, PlanSpec, StartJob, Visitation, World};
use fletch_client::{
    Client, ClientConfig, Endpoint,
    epochs::{JobHandle, LeaseBatch, Next, Received},
};
use fletch_core::{
    Hash,
    order::{
        Event, Tail,
        ledger::Ledger,
        receipt::{Delivery, content},
    },
};
use fletch_tests::{fixture::Site, readers::Data};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
    time::Duration,
};
use tokio::runtime::Handle;

const WANT: u32 = 8;
const RANKS: u32 = 2;

fn client(site: &Site) -> Client {
    // The socket is where it was after a restart.
    let endpoint: Endpoint = format!("unix:{}", site.socket().display()).parse().expect("socket");
    let config =
        ClientConfig { io_timeout: Duration::from_secs(10), ..ClientConfig::new(endpoint, "loader") };
    Client::new(config).expect("client")
}

/// Writes down what is consumed, durably, before it is acknowledged.
fn note(file: &mut File, b: &LeaseBatch) {
    let mut text = String::new();
    for s in &b.samples {
        let hashes: Vec<Hash> = s.files().map(|(_, bytes)| Hash::of(&bytes)).collect();
        text += &format!("{} {} {} {}\n", s.entry, s.ordinal, content(&hashes), s.copy);
    }
    file.write_all(text.as_bytes()).expect("written");
    file.sync_data().expect("durable");
}

/// One consumer's life. How many acks came too late.
async fn consume(job: JobHandle, rank: u32, path: PathBuf) -> u64 {
    let mut file = File::options().create(true).append(true).open(path).expect("file");
    let mut late = 0;
    let mut reader = job.reader(0, rank, 0).patient(Duration::from_secs(60));
    loop {
        match reader.next(WANT).await.expect("a lease, sooner or later") {
            Next::Batch(b) => {
                note(&mut file, &b);
                let acked = loop {
                    match job.ack(0, rank, &[b.token.ack(BatchTimes::default())]).await {
                        Err(e) if e.is_unreachable() => {}
                        other => break other,
                    }
                };
                job.held().drop_lease(0, rank, b.token.lease);
                match acked {
                    Ok(_) => {}
                    Err(e) if e.code() == Some(fletch_api::Code::LeaseGone) => late += 1,
                    Err(e) => panic!("{e}"),
                }
            }
            Next::Full | Next::Last => tokio::time::sleep(Duration::from_millis(50)).await,
            Next::Done => return late,
        }
    }
}

fn lines(dir: &Path) -> Vec<(u32, Delivery)> {
    let mut out = Vec::new();
    for file in fs::read_dir(dir).expect("dir") {
        let text = fs::read_to_string(file.expect("entry").path()).expect("text");
        for line in text.lines() {
            let f: Vec<&str> = line.split(' ').collect();
            let delivery = Delivery {
                ordinal: f[1].parse().expect("ordinal"),
                content: f[2].parse().expect("hash"),
                copy: f[3].parse().expect("copy"),
            };
            out.push((f[0].parse().expect("entry"), delivery));
        }
    }
    out
}

async fn killed(site: &mut Site, order: OrderKind, rounds: u32, samples: u64, seed: u64) {
    println!("order {order:?}, seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let ask = StartJob {
        name: format!("killed-{}", order.as_str()).parse().expect("name"),
        dataset: Some("d".parse().expect("name")),
        version: None,
        root: None,
        layout: None,
        seed: Some(seed),
        order,
        plan: PlanSpec::default(),
        world: World { ranks: RANKS, batch: RANKS * WANT, tail: Tail::Drop },
        visitation: Visitation::ExactlyOnce,
    };
    let job = client(site).declare(&ask).await.expect("declared");
    let notes = site.place(&format!("notes-{}", order.as_str()));
    fs::create_dir_all(&notes).expect("dir");
    let mut lives = 0;
    let mut start = |rank: u32| {
        lives += 1;
        let path = notes.join(format!("{rank}-{lives}"));
        // Its own connections, as another process has.
        let job = job.clone();
        Handle::current().spawn(consume(job, rank, path))
    };
    let mut consumers: Vec<_> = (0..RANKS).map(&mut start).collect();
    let (mut deaths, mut late) = (0, 0);
    for round in 0..rounds {
        tokio::time::sleep(Duration::from_millis(rng.random_range(5..150))).await;
        if round % 2 == 0 {
            tokio::task::block_in_place(|| {
                site.kill();
                site.restart();
            });
        } else {
            let rank = rng.random_range(0..RANKS);
            consumers[rank as usize].abort();
            let old = std::mem::replace(&mut consumers[rank as usize], start(rank));
            match old.await {
                Ok(n) => late += n,
                Err(e) => assert!(e.is_cancelled(), "{e}"),
            }
            deaths += 1;
        }
    }
    for c in consumers {
        late += c.await.expect("a consumer");
    }
    let ledger = Ledger::read(&job.ledger(0).await.expect("ledger")).expect("a ledger");
    let mut granted: BTreeMap<u32, u64> = BTreeMap::new();
    for e in &ledger.events {
        if let Event::Grant { entries, .. } = e {
            entries.iter().for_each(|e| *granted.entry(*e).or_default() += 1);
        }
    }
    let mut consumed: BTreeMap<u32, u64> = BTreeMap::new();
    let mut once = BTreeMap::new();
    for (entry, delivery) in lines(&notes) {
        *consumed.entry(entry).or_default() += 1;
        once.insert(entry, delivery);
    }
    let receipt = job.receipt(0).await.expect("finished");
    assert_eq!(consumed.len() as u64, receipt.receipt.delivered, "0 missing");
    assert_eq!(consumed.len() + receipt.receipt.dropped.len(), usize::try_from(samples).expect("few"));
    let twice: u64 = consumed.values().map(|n| n - 1).sum();
    assert!(consumed.iter().all(|(e, n)| granted[e] >= *n), "nothing comes that was not granted");
    let again: u64 = granted.values().map(|n| n - 1).sum();
    assert_eq!(again, receipt.receipt.redelivered, "counted");
    assert!(twice <= (deaths + late) * u64::from(WANT), "{twice} twice, {deaths} deaths, {late} late acks");
    // The sum over what was written down, each once, is the plan's.
    let mut all = Received::new(job.info().root);
    once.values().for_each(|d| all.add_delivery(d));
    assert!(all.agrees(&receipt));
    let mut tampered = Received::new(job.info().root);
    once.values().skip(1).for_each(|d| tampered.add_delivery(d));
    let first = once.values().next().expect("one");
    tampered.add_delivery(&Delivery { content: Hash::of(b"altered"), ..*first });
    assert!(!tampered.agrees(&receipt), "an altered sample is no proof");
    println!(
        "{} grants again, {twice} consumed twice, {deaths} deaths of consumers, {late} late acks",
        again
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
