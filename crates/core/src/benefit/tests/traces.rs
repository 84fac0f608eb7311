//! Batches that a real server observed while a bottleneck was injected.

use crate::benefit::{BatchObservation, Served, Window, estimate};

/// See its first lines.
const TRACES: &str = include_str!("traces.txt");
const SAMPLES: f64 = 32.0;

/// Returns the batch of a line, and what the disk did meanwhile.
fn parse(step: u64, line: &str) -> (BatchObservation, Served) {
    let seconds: Vec<f64> = line.split(' ').map(|us| us.parse::<f64>().expect("a time") / 1e6).collect();
    let [ended, waited, received, prepared, stepped, origin, disk, queue, busy] = seconds[..] else {
        panic!("{line}")
    };
    let batch = BatchObservation {
        step,
        rank: 0,
        lane: 0,
        ended,
        waited,
        received: Some(received),
        prepared,
        stepped,
        device: None,
        origin,
        disk,
        queue,
        hit_part: 1.0,
    };
    (batch, Served { start: ended - busy, end: ended, samples: if busy > 0.0 { SAMPLES } else { 0.0 } })
}

#[test]
fn verdicts_on_a_real_server_are_right() {
    let (_, windows) = TRACES.split_once("\n# disk: ").expect("a window");
    let windows: Vec<&str> = windows.split("\n# ").collect();
    assert_eq!(windows.len(), 6);
    for window in windows {
        let (title, lines) = window.split_once('\n').expect("a title");
        let verdict = title.split(' ').next_back().expect("a verdict");
        let (batches, disk): (Vec<_>, Vec<_>) =
            (0..).zip(lines.lines()).map(|(step, line)| parse(step, line)).unzip();
        assert_eq!(batches.len(), 64, "{title}");
        let e = estimate(&Window {
            batches: &batches,
            link: &[],
            disk: &disk,
            since: 0.0,
            first_byte: 0.0,
            samples: SAMPLES,
            decodes_in_loop: false,
        });
        let e = e.expect("64 steps");
        assert_eq!(format!("{:?}", e.verdict).to_lowercase(), verdict, "{title}: {e:?}");
    }
}
