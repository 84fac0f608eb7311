//! Tests what the server says about the benefit of cache to a job.

use crate::common::{Node, Tree, content, epochs::*, index_bucket};
use fletch_api::{BatchTimes, OrderKind, benefit::BenefitVerdict};
use fletch_client::epochs::{JobHandle, Next};
use fletch_core::plan::Tail;
use fletch_testkit::{Backing, EmulatorConfig, OriginEmulator};
use std::time::{Duration, Instant};

/// What the origin's link carries, in bytes a second.
const LINK: u64 = 400_000;
const SAMPLE: usize = 8_192;
const STEP: Duration = Duration::from_millis(5);

/// Trains one epoch in steps of [`STEP`], and says in each ack how long it waited.
async fn train(job: &JobHandle, epoch: u64) {
    let mut reader = job.reader(epoch, 0, 0);
    loop {
        let asked = Instant::now();
        let Next::Batch(batch) = reader.next(4).await.expect("a lease") else { return };
        let waited = asked.elapsed();
        let begun = Instant::now();
        tokio::time::sleep(STEP).await;
        let ns = |d: Duration| u64::try_from(d.as_nanos()).expect("short");
        let times = BatchTimes {
            entries: 4,
            waited_ns: ns(waited),
            stepped_ns: ns(begun.elapsed()),
            in_loop: false,
            ..BatchTimes::default()
        };
        job.ack(epoch, 0, &[batch.token.ack(times)]).await.expect("acknowledged");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_waits_for_its_origin_until_its_data_is_cached() {
    let mut tree = Tree::new([]);
    for i in 0..120 {
        let (name, bytes) = (format!("f{i:04}"), content(i, SAMPLE));
        std::fs::write(tree.path(&name), &bytes).expect("write");
        tree.files.insert(name, bytes);
    }
    let backing = || Backing::Directory(tree.dir.path().to_owned());
    index_bucket(&tree, &OriginEmulator::start(EmulatorConfig::default(), backing())).await;
    let slow = EmulatorConfig { total_bytes_per_s: Some(LINK), ..EmulatorConfig::default() };
    let emulator = OriginEmulator::start(slow, backing());
    let settings = tempfile::tempdir().expect("tempdir");
    let file = settings.path().join("f.toml");
    let text = format!(
        "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nallow_http = true\nregion = \"us-east-1\"\n\
         credentials = \"anonymous\"\n",
        emulator.uri(),
        emulator.endpoint()
    );
    std::fs::write(&file, text).expect("write");
    let node = Node::start(&[&format!("--config={}", file.display())]).await;
    node.register("d", &emulator.uri(), Some(&tree.uri())).await;
    let what = ask("train", OrderKind::Strict, world(1, 4, Tail::Keep));
    let job = client(&node).declare(&what).await.expect("declared");
    let benefit = async || job.current().await.expect("job").benefit.expect("the server says it");

    let before = benefit().await;
    assert_eq!(before.not_measured.as_deref(), Some("not measured yet: 0 of 8 steps"));
    assert!(before.estimate.is_none());

    train(&job, 0).await;
    let first = benefit().await;
    let estimate = first.estimate.expect("30 steps");
    assert_eq!((first.steps, estimate.verdict), (30, BenefitVerdict::Origin), "{estimate:?}");
    assert!(estimate.cached < 0.05 && estimate.fetch > 0.5, "{estimate:?}");
    // Nothing was in the cache, so the job ran at the rate of the link, or slower on a busy machine.
    let link = LINK as f64 / SAMPLE as f64;
    let origin = estimate.origin_rate.expect("it was read");
    assert!((0.25 * link..1.5 * link).contains(&origin), "{origin} of {link}: {estimate:?}");
    let cached = estimate.what_if.last().expect("all of it cached");
    assert_eq!(cached.cached, 1.0);
    assert!(cached.rate > 2.0 * estimate.rate, "{estimate:?}");

    // The verdict follows within 64 steps, when everything comes from the cache.
    for epoch in 1..4 {
        train(&job, epoch).await;
    }
    let estimate = benefit().await.estimate.expect("120 steps");
    assert_ne!(estimate.verdict, BenefitVerdict::Origin, "{estimate:?}");
    assert!(estimate.cached > 0.7, "{estimate:?}");
    node.running.shutdown().await;
}
