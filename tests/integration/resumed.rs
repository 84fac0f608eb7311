//! I2, I5: an epoch continues from its state alone.
//!
//! The test kills the server and deletes its cache and state directories. A new server delivers exactly the
//! rest of the plan, to another number of ranks.

use fletch_api::{BatchTimes, OrderKind, PlanSpec, StartJob, Visitation, WorldSpec};
use fletch_client::{
    Client, ClientConfig, Endpoint,
    epochs::{JobHandle, LeaseBatch, Next, ReceivedSum},
};
use fletch_core::{Hash, plan::Tail};
use fletch_tests::{
    bins::{command, run},
    fixture::Site,
    readers::Data,
};
use std::{collections::BTreeMap, fs};

const SAMPLES: u32 = 480;
/// The entries of a step of all ranks together.
const BATCH: u32 = 24;
/// The steps before the server and its directories are lost.
const BEFORE: u32 = 7;

/// A client of the server's current address.
fn client(site: &Site) -> Client {
    let endpoint: Endpoint = site.url.parse().expect("url");
    Client::new(ClientConfig::new(endpoint, "loader")).expect("client")
}

fn ask(dataset: &str, name: &str, order: OrderKind, ranks: u32) -> StartJob {
    StartJob {
        name: name.parse().expect("name"),
        dataset: Some(dataset.parse().expect("name")),
        version: None,
        root: None,
        layout: None,
        seed: Some(11),
        order,
        buckets: None,
        replay: None,
        plan: PlanSpec::default(),
        world: WorldSpec { ranks, batch: BATCH, tail: Tail::Drop },
        visitation: Visitation::ExactlyOnce,
    }
}

async fn take(job: &JobHandle, rank: u32) -> LeaseBatch {
    let want = BATCH / job.info().world.ranks;
    match job.reader(0, rank, 0).next(want).await.expect("a lease") {
        Next::Batch(b) => b,
        other => panic!("{other:?}"),
    }
}

/// Takes `n` steps of every rank. Returns the entries of each step, in order of steps and ranks.
async fn steps(
    job: &JobHandle,
    n: u32,
    files: &BTreeMap<String, Hash>,
    sum: &mut ReceivedSum,
) -> Vec<Vec<u32>> {
    let mut all = Vec::new();
    for _ in 0..n {
        for rank in 0..job.info().world.ranks {
            let b = take(job, rank).await;
            for s in &b.samples {
                let (file, bytes) = s.files().next().expect("a file");
                assert!(Hash::of(&bytes) == files[&file.path], "I1: {}", file.path);
                sum.add(s);
            }
            job.ack(0, rank, &[b.token.ack(BatchTimes::default())]).await.expect("acknowledged");
            job.held().release(0, rank, b.token.lease);
            all.push(b.samples.iter().map(|s| s.entry).collect());
        }
    }
    all
}

fn sorted(entries: impl IntoIterator<Item = u32>) -> Vec<u32> {
    let mut all: Vec<u32> = entries.into_iter().collect();
    all.sort_unstable();
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn i2_after_the_loss_of_everything_the_rest_of_the_plan_is_delivered_to_another_world() {
    let data = Data::new(77, u64::from(SAMPLES), 5_000);
    let files: BTreeMap<String, Hash> = data.files.iter().cloned().collect();
    let more = ["--memory", "64MiB", "--cache-size", "64MiB", "--cache-free-floor", "0"];
    let mut site = Site::start(&more);
    for packed in [false, true] {
        // Tables and packs are at the origin: they are not lost.
        let (verb, dataset) = if packed { ("pack", "packs") } else { ("index", "files") };
        let to = site.place(&format!("tables-{dataset}"));
        let mut c = command("fletch");
        c.args([verb, "--quiet", "--to"]).arg(&to).arg(&data.dir);
        run(c.env("FLETCH_STATE_DIR", site.place("made")));
        let register = |site: &Site| {
            site.register(dataset, &data.dir.display().to_string(), &to.display().to_string());
        };
        register(&site);
        // In the last ones one rank is a step ahead of the others when the state is saved.
        for (order, before, after, ahead) in [
            (OrderKind::Strict, 2, 8, false),
            (OrderKind::Strict, 4, 1, false),
            (OrderKind::Substitute, 2, 8, false),
            (OrderKind::Strict, 2, 3, true),
            (OrderKind::Substitute, 4, 3, true),
        ] {
            let name = format!("{}-{before}-{after}", order.as_str());
            let job = client(&site).declare(&ask(dataset, &name, order, before)).await.expect("declared");
            let mut sum = ReceivedSum::new(job.info().root);
            let mut first = steps(&job, BEFORE, &files, &mut sum).await;
            if ahead {
                let b = take(&job, 0).await;
                b.samples.iter().for_each(|s| sum.add(s));
                job.ack(0, 0, &[b.token.ack(BatchTimes::default())]).await.expect("acknowledged");
                first.push(b.samples.iter().map(|s| s.entry).collect());
            }
            let acked: u32 = first.iter().map(|b| u32::try_from(b.len()).expect("few")).sum();
            // In flight: received and not acknowledged when everything ends.
            let flying = take(&job, 1).await;
            let state = job.state(0).await.expect("state");
            // What the strict order delivers to the other world from the start.
            let whole = {
                let job =
                    client(&site).declare(&ask(dataset, "whole", order, after)).await.expect("declared");
                let mut sum = ReceivedSum::new(job.info().root);
                let all = steps(&job, SAMPLES / BATCH, &files, &mut sum).await;
                client(&site).delete_job(&job.info().id).await.expect("deleted");
                all
            };
            site.kill();
            for lost in ["cache", "state"] {
                fs::remove_dir_all(site.place(lost)).expect("lost");
            }
            site.restart();
            register(&site);
            let job = client(&site).declare(&ask(dataset, &name, order, after)).await.expect("declared anew");
            let there = job.put_state(0, state, false).await.expect("resumed");
            assert_eq!((there.acked, there.world.ranks), (u64::from(acked), after));
            let rest = steps(&job, (SAMPLES - acked).div_ceil(BATCH), &files, &mut sum).await;
            let receipt = job.receipt(0).await.expect("finished");
            assert!(sum.agrees(&receipt), "{name}");
            let delivered = first.iter().chain(&rest).flatten().copied();
            assert_eq!(
                sorted(delivered),
                (0..SAMPLES).collect::<Vec<_>>(),
                "delivered and rest are the plan"
            );
            let flown = flying.samples.iter().all(|s| rest.iter().flatten().any(|e| *e == s.entry));
            assert!(flown, "what was in flight is delivered again");
            if order == OrderKind::Strict && !ahead {
                let from = (BEFORE * after) as usize;
                assert_eq!(rest, whole[from..], "bit-identical from the step boundary on");
            }
            println!(
                "{dataset}, {name}: {acked} delivered, all lost, {} more to {after} ranks: the plan, exactly",
                rest.iter().map(Vec::len).sum::<usize>()
            );
            client(&site).delete_job(&job.info().id).await.expect("deleted");
        }
    }
}
