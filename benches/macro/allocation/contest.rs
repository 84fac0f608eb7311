//! Job A computes at .8 of its link, and never waits. Job B could read at 4 times its link. The disk has room
//! for half of one dataset. A reads until B has made its passes from an empty cache.
//!
//! The arms: `fletch` divides the disk by what it is worth; `equal` decides once an hour, so that both
//! datasets keep equal shares; `lru` is `cache.policy = "lru"` under the order `strict`. The row `free` is A
//! alone, over a link without a limit.

use super::{
    judge,
    rig::{BATCH, CHUNK, Rig, mib_per_s},
    training::{Fared, Training, declare},
};
use fletch_api::OrderKind;
use fletch_benches::{arg, span};
use std::time::Duration;
use tokio::{
    runtime::Runtime,
    time::{Instant, sleep},
};
use tokio_util::task::TaskTracker;

/// What A computes and what B could read, in parts of a link.
const RATES: [f64; 2] = [0.8, 4.0];

/// The result of one arm.
#[derive(Debug, Clone, Copy)]
struct Measured {
    /// A's rate in bytes a second.
    a: f64,
    b: Fared,
    /// B's part of the bytes that are divided at the end, and when it was first 90 %, in seconds.
    part: f64,
    settled: Option<f64>,
}

struct Contest {
    rig: Rig,
    disk: u64,
    link: f64,
    passes: u64,
    interval: String,
}

impl Contest {
    /// Plays one arm. With `alone`, A runs alone for as many seconds.
    async fn play(&self, arm: &str, alone: Option<f64>) -> Measured {
        let limit = Some(self.link);
        let origins = self.rig.origins(&if alone.is_some() { [None, None] } else { [limit, limit] });
        let interval = if arm == "equal" { "1h" } else { self.interval.as_str() };
        let policy = if arm == "lru" { "lru" } else { "fletch" };
        let (interval, policy) =
            (format!("--cache-decision-interval={interval}"), format!("--cache-policy={policy}"));
        let server = self.rig.serve(&origins, self.disk, &[&interval, &policy]);
        let client = server.client();
        let order = if arm == "lru" { OrderKind::Strict } else { OrderKind::Substitute };
        let tasks = TaskTracker::new();
        let (computes, waits) = (Training::new(RATES[0] * self.link), Training::new(RATES[1] * self.link));
        let a = declare(&client, ("a", 0), order, BATCH).await;
        let a = tasks.spawn(computes.clone().run(a, 0..u64::MAX));
        if let Some(seconds) = alone {
            sleep(Duration::from_secs_f64(seconds)).await;
            computes.stop();
            let a = a.await.expect("job A").rate();
            return Measured { a, b: Fared { seconds, bytes: 0 }, part: 0.0, settled: None };
        }
        let b = declare(&client, ("b", 1), order, BATCH).await;
        let begun = Instant::now();
        let b = tasks.spawn(waits.run(b, 0..self.passes));
        let (mut part, mut settled) = (0.0, None);
        while !b.is_finished() {
            sleep(Duration::from_millis(250)).await;
            let now = client.allocation().await.expect("the allocation");
            let share = now.datasets.iter().find(|d| d.dataset.as_str() == "d1" && d.is_sweep);
            part = share.map_or(0.0, |d| d.share_bytes as f64 / now.capacity_bytes as f64);
            if part >= 0.9 && settled.is_none() {
                settled = Some(begun.elapsed().as_secs_f64());
            }
        }
        let b = b.await.expect("job B");
        computes.stop();
        Measured { a: a.await.expect("job A").rate(), b, part, settled }
    }
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Plays the arms in turn. Returns whether a target is missed.
pub fn run(runtime: &Runtime) -> bool {
    let chunks: usize = arg("chunks", 800);
    let contest = Contest {
        rig: Rig::new(&[chunks, chunks]),
        disk: (chunks * CHUNK / 2) as u64,
        link: mib_per_s(arg("link-mib-per-s", 10.0)),
        passes: arg("passes", 10),
        interval: arg("interval", "2s".to_owned()),
    };
    let (rounds, arms): (usize, String) = (arg("rounds", 1), arg("arms", "fletch,equal,lru".to_owned()));
    let mut all: Vec<(String, Measured)> = Vec::new();
    for round in 0..rounds {
        for arm in arms.split(',') {
            let m = runtime.block_on(contest.play(arm, None));
            eprintln!("round {round}, {arm}: {m:?}");
            all.push((arm.to_owned(), m));
            if arm == "fletch" {
                let free = runtime.block_on(contest.play("fletch", Some(m.b.seconds)));
                eprintln!("round {round}, free: {free:?}");
                all.push(("free".to_owned(), free));
            }
        }
    }
    let of = |arm: &str, figure: fn(&Measured) -> f64| -> Vec<f64> {
        all.iter().filter(|(name, _)| name == arm).map(|(_, m)| figure(m)).collect()
    };
    println!("| arm | B's time, s | B's part of the disk | 90 % after, s | A's rate, MiB/s |");
    println!("|---|---|---|---|---|");
    for arm in arms.split(',').chain(["free"]) {
        println!(
            "| {arm} | {} | {} | {} | {} |",
            span(&of(arm, |m| m.b.seconds)),
            span(&of(arm, |m| m.part)),
            span(&of(arm, |m| m.settled.unwrap_or(f64::INFINITY))),
            span(&of(arm, |m| m.a / f64::from(1 << 20))),
        );
    }
    let json: String = arg("json", String::new());
    if !json.is_empty() {
        let raw: Vec<_> = all
            .iter()
            .map(|(arm, m)| {
                serde_json::json!({"arm": arm, "b_seconds": m.b.seconds, "b_bytes": m.b.bytes,
                    "b_part": m.part, "settled_s": m.settled, "a_bytes_per_s": m.a})
            })
            .collect();
        std::fs::write(&json, serde_json::to_string_pretty(&raw).expect("json")).expect("written");
    }
    let time = |arm| median(of(arm, |m| m.b.seconds));
    let rate = |arm| median(of(arm, |m| m.a));
    let musts = [
        ("B's part of the disk", median(of("fletch", |m| m.part)), 0.9),
        ("B is faster than under lru, times", time("lru") / time("fletch"), 1.5),
        ("B is faster than with equal shares, times", time("equal") / time("fletch"), 1.25),
        ("A's rate, of its rate with a free link", rate("fletch") / rate("free"), 0.98),
    ];
    musts.into_iter().fold(false, |missed, (what, figure, least)| judge(what, figure, least) || missed)
}
