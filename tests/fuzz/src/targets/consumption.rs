//! Consumption logs, which consumers write and `fletch receipt verify` reads.

use super::golden_json;
use crate::plant;
use fletch_core::delivery::consumption_log::{self, ConsumptionLog};

pub fn seeds() -> Vec<Vec<u8>> {
    let golden = golden_json("epochs/notes.json");
    let lines: Vec<&str> =
        golden["lines"].as_array().into_iter().flatten().filter_map(|l| l.as_str()).collect();
    let short: Vec<&str> = lines.iter().copied().filter(|l| !l.starts_with("sum")).collect();
    vec![
        format!("{}\n", lines.join("\n")).into_bytes(),
        format!("{}\n# end\n", short.join("\n")).into_bytes(),
    ]
}

/// What was read is written and read again.
pub fn run(input: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(input) else { return false };
    let Ok(log) = ConsumptionLog::parse(text) else { return false };
    let mut again = consumption_log::head(log.root, log.epoch) + "\n";
    log.records.iter().for_each(|(_, r)| again += &format!("{r}\n"));
    log.sums.iter().for_each(|(n, value)| again += &format!("{}\n", consumption_log::sum(*n, value)));
    let read = ConsumptionLog::parse(&again).expect("a log that was written");
    let values = |l: &ConsumptionLog| l.records.iter().map(|r| r.1).collect::<Vec<_>>();
    assert_eq!((read.root, read.epoch, &read.sums), (log.root, log.epoch, &log.sums));
    assert_eq!(values(&read), values(&log));
    plant::bug(log.records.iter().any(|(_, r)| r.at.is_some_and(|(lease, _)| lease != 7)));
    true
}
