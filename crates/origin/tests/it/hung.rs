//! Reads of healthy objects beside reads of objects that never answer, at one origin.

use crate::{config, limits, uri};
use fletch_origin::{Origin, OriginConfig, OriginLimits, Origins};
use fletch_testkit::{Backing, EmulatorConfig, Fault, Latency, OriginEmulator};
use std::time::{Duration, Instant};

const HUNG: usize = 500;

/// Returns an emulator whose objects below `hung/` never answer.
fn emulator() -> OriginEmulator {
    let first_byte = Some(Latency { median: Duration::from_millis(10), p99: Duration::from_millis(15) });
    let emulator =
        OriginEmulator::start(EmulatorConfig { first_byte, ..EmulatorConfig::default() }, Backing::empty());
    for i in 0..64 {
        emulator.insert(&format!("ok/{i}"), "1");
    }
    emulator.set_fault("hung/", Fault::Stall, None);
    emulator
}

/// Runs `healthy` while each hung object is read again and again.
async fn beside_hung<T>(origin: &Origin, healthy: impl Future<Output = T>) -> T {
    let read = |i: usize| async move {
        loop {
            origin.get(&format!("hung/{i}"), None, None).await.expect_err("never answers");
        }
    };
    let hung = futures::future::join_all((0..HUNG).map(read));
    tokio::select! {
        _ = hung => unreachable!("the loops have no end"),
        got = healthy => got,
    }
}

/// Reads healthy objects, `at_once` at a time. Returns the time of each read, and of all.
async fn read(origin: &Origin, n: usize, at_once: usize) -> (Vec<Duration>, Duration) {
    let begun = Instant::now();
    let reads = (0..n).map(|i| async move {
        let begun = Instant::now();
        origin.get(&format!("ok/{}", i % 64), None, None).await.expect("a healthy object");
        begun.elapsed()
    });
    let mut times: Vec<Duration> = futures::StreamExt::collect(futures::StreamExt::buffer_unordered(
        futures::stream::iter(reads),
        at_once,
    ))
    .await;
    times.sort_unstable();
    (times, begun.elapsed())
}

fn open(emulator: &OriginEmulator, concurrency: Option<u32>) -> Origin {
    let configs = vec![OriginConfig { concurrency, ..config(emulator) }];
    let limits = OriginLimits { requests_max: 32, ..limits(20_000) };
    Origins::new(configs, limits).expect("right").open(&uri(&emulator.uri())).expect("open")
}

/// With the permits that backends share, with those of an `[[origin]]`, and with more of them than of all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hung_objects_do_not_stop_healthy_ones() {
    for concurrency in [None, Some(24), Some(100)] {
        let emulator = emulator();
        let origin = open(&emulator, concurrency);
        // As every server does, it has read something before: the pace of the origin is known.
        read(&origin, 4, 1).await;
        let healthy = async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            let (first, _) = read(&origin, 1, 1).await;
            // The queue before it held 500 hung reads; half of the permits pass on in every 300 ms.
            assert!(first[0] < Duration::from_secs(20), "{concurrency:?}: {first:?}");
            // The next ones find half of the permits free of hung reads.
            let (times, _) = read(&origin, 640, 64).await;
            times[times.len() / 2]
        };
        let median = beside_hung(&origin, healthy).await;
        assert!(median < Duration::from_secs(1), "{concurrency:?}: {median:?}");
        let counts = emulator.counts();
        assert!(counts.get < 3_000, "{concurrency:?}: {} requests are a storm", counts.get);
    }
}

/// `make accept-hung-objects` measures it: the pace of healthy reads beside 500 hung ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn healthy_reads_keep_half_of_their_pace() {
    let is_measured = std::env::var_os("FLETCH_HUNG_OBJECTS").is_some();
    let n = if is_measured { 6_400 } else { 640 };
    for concurrency in [None, Some(32)] {
        let emulator = emulator();
        let origin = open(&emulator, concurrency);
        let (_, alone) = read(&origin, n, 64).await;
        let healthy = async {
            // Until each hung object was tried once, and the first attempts ended.
            tokio::time::sleep(Duration::from_secs(10)).await;
            read(&origin, 64, 64).await;
            read(&origin, n, 64).await
        };
        let (times, beside) = beside_hung(&origin, healthy).await;
        let ratio = beside.as_secs_f64() / alone.as_secs_f64();
        let slowest = times.last().copied().unwrap_or_default();
        println!(
            "concurrency {concurrency:?}: {n} healthy reads take {alone:.2?} alone and {beside:.2?} beside \
             {HUNG} hung ones: {ratio:.2} times; the slowest takes {slowest:.2?}"
        );
        assert!(slowest < Duration::from_secs(10), "{slowest:?}");
        assert!(!is_measured || ratio <= 2.0, "{ratio}");
    }
}
