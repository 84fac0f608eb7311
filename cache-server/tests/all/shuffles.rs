//! Tests how random the delivered orders are: positions, neighbours, samples of one chunk, and repetition
//! from epoch to epoch.
//!
//! Each bound lies well beyond what a server delivers, also on a slow machine, and below what known defects
//! caused.

use crate::common::{Node, Tree, content, epochs::*};
use fletch_api::{OrderKind, routes};
use fletch_client::epochs::{EpochReader, JobHandle, Next};
use fletch_core::{
    delivery::certificate::{Certificate, Shuffle, chance},
    manifest::{LayoutParams, pack::PackParams},
    plan::Tail,
};
use std::path::Path;

/// The number of samples, and the bytes of each. The disk holds a fifth of them.
const SAMPLES: usize = 3_800;
const BYTES: usize = 16 << 10;
const LEASE: u32 = 32;
const EPOCHS: usize = 3;
/// A server delivers .17 to .30. Units delivered in one burst each would have .9.
const MATES_MOST: f64 = 0.6;
/// A server delivers .33 to .80, because a sweep goes round one ring in a slightly changed order. The same
/// order twice would have 1.
const AGAIN_MOST: f64 = 0.97;

/// A uniform shuffle has 49 ± 10. A server delivers 41 ± 7, at most 58, over 26 seeds and also on a slow
/// machine. Samples that are read alone come in order of their numbers: an order with many of them had 172,
/// because the disk rejected units.
const CHI2_MOST: f64 = 110.0;
/// Of either sign. A uniform shuffle has 0 ± .016. A server delivers .004 ± .015, at most .05. The order with
/// many samples read alone had .09.
const SERIAL_MOST: f64 = 0.08;

/// A running job, and its orders so far.
struct Reading {
    job: JobHandle,
    reader: EpochReader,
    orders: Vec<Vec<u32>>,
}

impl Reading {
    fn new(job: JobHandle) -> Self {
        let reader = job.reader(0, 0, 0);
        Reading { job, reader, orders: vec![Vec::new()] }
    }

    /// Reads and acknowledges a batch. Returns whether there was one.
    async fn step(&mut self) -> bool {
        loop {
            match self.reader.next(LEASE).await.expect("a lease") {
                Next::Batch(b) => {
                    ack(&self.job, &b).await;
                    self.orders.last_mut().expect("an epoch").extend(b.samples.iter().map(|s| s.sample));
                    return true;
                }
                Next::Done if self.orders.len() < EPOCHS => {
                    self.reader = self.job.reader(self.orders.len() as u64, 0, 0);
                    self.orders.push(Vec::new());
                }
                Next::Done => return false,
                other => panic!("{other:?}"),
            }
        }
    }
}

fn correlation(pairs: impl Iterator<Item = (f64, f64)> + Clone) -> f64 {
    let n = pairs.clone().count() as f64;
    let (sx, sy) = pairs.clone().fold((0.0, 0.0), |(a, b), (x, y)| (a + x, b + y));
    let (mx, my) = (sx / n, sy / n);
    let (xy, xx, yy) = pairs.fold((0.0, 0.0, 0.0), |(a, b, c), (x, y)| {
        (a + (x - mx) * (y - my), b + (x - mx).powi(2), c + (y - my).powi(2))
    });
    xy / (xx * yy).sqrt()
}

/// Returns chi square (49 degrees of freedom) of eighths of the numbers against eighths of the positions.
fn chi2(order: &[u32]) -> f64 {
    let n = order.len();
    let mut table = [[0.0; 8]; 8];
    for (at, &number) in order.iter().enumerate() {
        table[number as usize * 8 / n][at * 8 / n] += 1.0;
    }
    let expected = n as f64 / 64.0;
    table.iter().flatten().map(|x: &f64| (x - expected).powi(2) / expected).sum()
}

/// Creates a tree and a pack of it, with about thirty samples a chunk. Returns each chunk's samples.
fn packed(to: &Path) -> (Tree, Vec<(String, Vec<u64>)>) {
    let mut tree = Tree::new([]);
    for i in 0..SAMPLES {
        let name = format!("f{i:04}");
        let bytes = content(100 + i as u64, BYTES);
        std::fs::write(tree.path(&name), &bytes).expect("write");
        tree.files.insert(name, bytes);
    }
    let small = PackParams { group_bytes: 768 << 10, ..PackParams::DEFAULT };
    let params = LayoutParams { pack: Some(small), ..LayoutParams::PACK };
    let (_, chunks) = tree.pack_with(to, params, false);
    (tree, chunks)
}

#[tokio::test(flavor = "multi_thread")]
async fn delivered_orders_are_shuffled_as_their_certificates_say() {
    let to = tempfile::tempdir().expect("tempdir");
    let (tree, chunks) = packed(to.path());
    let mut unit_of = vec![u32::MAX; SAMPLES];
    for (unit, (_, members)) in (0..).zip(&chunks) {
        members.iter().for_each(|&m| unit_of[usize::try_from(m).expect("small")] = unit);
    }
    let by_chance = chance(chunks.iter().map(|c| c.1.len() as u64));
    assert!(chunks.len() > 100 && SAMPLES / chunks.len() > 30, "{} chunks", chunks.len());

    let node = Node::start(&["--cache-size=17MiB", "--cache-free-floor=0", "--memory=64MiB"]).await;
    node.register("d", &tree.uri(), Some(&to.path().display().to_string())).await;
    let client = client(&node);
    let mut jobs = Vec::new();
    for name in ["a", "b"] {
        let ask = ask(name, OrderKind::Substitute, world(1, LEASE, Tail::Keep));
        jobs.push(Reading::new(client.declare(&ask).await.expect("declared")));
    }
    // The second job is half an epoch behind the first.
    for _ in 0..SAMPLES / LEASE as usize / 2 {
        assert!(jobs[0].step().await);
    }
    loop {
        let mut going = false;
        for job in &mut jobs {
            going |= job.step().await;
        }
        if !going {
            break;
        }
    }
    let mut poor = 0;
    for reading in &jobs {
        let mut positions = Vec::new();
        for (epoch, order) in (0..).zip(&reading.orders) {
            let mut at = vec![f64::NAN; SAMPLES];
            order.iter().enumerate().for_each(|(p, &s)| at[s as usize] = p as f64);
            assert!(order.len() == SAMPLES && at.iter().all(|p| !p.is_nan()), "a permutation");
            let chi2 = chi2(order);
            let serial = correlation(order.windows(2).map(|w| (f64::from(w[0]), f64::from(w[1]))));
            let mut shuffle = Shuffle::default();
            order.iter().for_each(|&s| shuffle.see(unit_of[s as usize]));
            let seen: Certificate = shuffle.certificate(by_chance);
            let said = reading.job.receipt(epoch).await.expect("finished").certificate;
            println!(
                "{}: epoch {epoch}: chi2 {chi2:.1}, serial {serial:.3}, {seen:?}",
                reading.job.info().name
            );
            assert!(chi2 < CHI2_MOST, "numbers have their places: {chi2}");
            assert!(serial.abs() < SERIAL_MOST, "neighbours are alike: {serial}");
            assert_eq!(said.delivered, seen.delivered);
            for (ours, theirs) in
                [(seen.near, said.near), (seen.near10, said.near10), (seen.mates, said.mates)]
            {
                assert!((ours - theirs).abs() < 1e-9, "the certificate tells the truth: {seen:?}, {said:?}");
            }
            assert!(seen.mates < MATES_MOST, "chunk-mates come together: {seen:?}");
            assert_eq!(said.poor, seen.poor);
            poor += u64::from(said.poor);
            positions.push(at);
        }
        for pair in positions.windows(2) {
            let again = correlation(pair[0].iter().copied().zip(pair[1].iter().copied()));
            println!("{}: positions in two epochs correlate by {again:.3}", reading.job.info().name);
            assert!(again < AGAIN_MOST, "every epoch has the same order: {again}");
        }
    }
    let finished =
        async |how| node.metric(&format!("fletch_epochs_finished_total{{shuffle=\"{how}\"}}")).await;
    let all = (jobs.len() * EPOCHS) as u64;
    assert_eq!((finished("well").await, finished("poor").await), (all - poor, poor));
    // A reader that is so slow that its lease's units are evicted first reads those samples alone.
    let slow = client
        .declare(&ask("slow", OrderKind::Substitute, world(1, 1024, Tail::Keep)))
        .await
        .expect("declared");
    let path = routes::epoch(&slow.info().id, 0, "leases");
    let lease = serde_json::json!({"rank": 0, "sequence": 1, "want": 1024}).to_string();
    let answer = node.post(&path, lease).send().await.expect("answer");
    assert_eq!(answer.status(), 200);
    let mut reader = jobs[0].job.reader(EPOCHS as u64, 0, 0);
    while let Next::Batch(b) = reader.next(LEASE).await.expect("a lease") {
        ack(&jobs[0].job, &b).await;
    }
    let late = answer.bytes().await.expect("the lease's bytes");
    assert!(late.len() > 1024 * BYTES);
    // What is read alone does not stay in the sweep's share: no order of the sweep would ever drop it.
    let (kept, kept_bytes) =
        (node.metric("fletch_disk_chunks ").await, node.metric("fletch_disk_chunk_bytes").await);
    let smallest = chunks.iter().map(|c| c.1.len()).min().expect("a chunk") * BYTES;
    println!("{kept} chunks of {kept_bytes} bytes are kept");
    assert!(kept_bytes >= kept * smallest as u64, "single files stay: {kept} chunks of {kept_bytes} bytes");
    node.running.shutdown().await;
}

/// If the disk keeps nothing for the sweep, samples of one chunk lie no nearer to each other than by chance.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_kept_for_an_order_does_not_shape_it() {
    let to = tempfile::tempdir().expect("tempdir");
    let (tree, _) = packed(to.path());
    let lru = ["--cache-policy=lru", "--cache-size=17MiB", "--cache-free-floor=0", "--memory=64MiB"];
    let node = Node::start(&lru).await;
    node.register("d", &tree.uri(), Some(&to.path().display().to_string())).await;
    let ask = ask("j", OrderKind::Substitute, world(1, LEASE, Tail::Keep));
    let mut reading = Reading::new(client(&node).declare(&ask).await.expect("declared"));
    while reading.orders.len() == 1 {
        assert!(reading.step().await);
    }
    let said = reading.job.receipt(0).await.expect("finished").certificate;
    let chi2 = chi2(&reading.orders[0]);
    println!("chi2 {chi2:.1}, {said:?}");
    // Handed out chunk by chunk, near was 23.
    assert!(said.delivered == SAMPLES as u64 && said.near10 < 2.0, "{said:?}");
    assert!(chi2 < CHI2_MOST, "numbers have their places: {chi2}");
    node.running.shutdown().await;
}
