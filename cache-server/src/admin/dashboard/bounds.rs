//! The bounds of what is wrong: the same numbers as in the Prometheus rules of `helm/fletch/rules`.
//!
//! A test compares each of them with the text of the rule. Where a rule waits (`for`), the page does not: a
//! problem is on the page at once, and an alert fires when it lasts.

use std::time::Duration;

/// The window of counts of requests to origins that were asked to slow down.
pub const PAUSES_WITHIN: Duration = Duration::from_secs(10 * 60);
/// The most pauses in that window that an origin may ask for.
pub const PAUSES_MAX: u64 = 3;
/// The window of failed operations on the disk of the cache.
pub const DISK_ERRORS_WITHIN: Duration = Duration::from_secs(15 * 60);
/// The window of errors of requests, wrong bytes, damaged chunks, faults of epochs and thrashing.
pub const HOUR: Duration = Duration::from_secs(3600);
/// The part of requests that may end with an error of the server, as a multiple of the objective.
pub const ERRORS_BURN: f64 = 14.4;
/// The part of requests that the objective allows to fail: 0.1 %.
pub const ERRORS_OBJECTIVE: f64 = 0.001;
/// A dataset thrashes if more than this multiple of it was read from its origin in an hour.
pub const THRASHED_READS: f64 = 1.2;
/// A dataset of which the cache saves at least this part of what it delivers does not thrash.
pub const THRASHED_SAVED: f64 = 0.1;
/// A job that runs at less than this part of its speed is slow.
pub const SLOW_SPEED: f64 = 0.5;
/// A job whose replies wait for more than this part of the time is slow.
pub const SLOW_STALL: f64 = 0.9;
/// A job that is slow for as long is stalled for its user.
pub const SLOW_FOR: Duration = Duration::from_secs(10 * 60);
/// The least free part of the disk of the state directory.
pub const STATE_FREE_MIN: f64 = 0.05;
/// The most part of its memory limit that the process may use.
pub const MEMORY_MAX: f64 = 0.9;
/// Credentials that expire within this time are a problem.
pub const CREDENTIALS_WITHIN: Duration = Duration::from_secs(15 * 60);
/// A certificate that expires within this time is a problem.
pub const CERTIFICATE_WITHIN: Duration = Duration::from_secs(7 * 24 * 3600);

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_api::dashboard::Alert;

    const RULES: [&str; 2] = [
        include_str!("../../../../helm/fletch/rules/alerts.yaml"),
        include_str!("../../../../helm/fletch/rules/error-budget.yaml"),
    ];

    /// Returns the texts of the rules of an alert, each on one line.
    fn rules(alert: Alert) -> Vec<String> {
        let begin = format!("- alert: {}\n", alert.as_str());
        let rules = RULES.iter().flat_map(|text| text.split(&begin).skip(1));
        let of = |rule: &str| {
            let end = rule.find("- alert: ").unwrap_or(rule.len());
            rule[..end].split_whitespace().collect::<Vec<_>>().join(" ")
        };
        rules.map(of).collect()
    }

    fn minutes(d: Duration) -> String {
        match d.as_secs() / 60 {
            60 => "1h".to_owned(),
            n => format!("{n}m"),
        }
    }

    #[test]
    fn bounds_are_those_of_the_rules() {
        let certificate = format!("< {} * 24 * 3600", CERTIFICATE_WITHIN.as_secs() / 86_400);
        let (hour, quarter) = (minutes(HOUR), minutes(DISK_ERRORS_WITHIN));
        let all: &[(Alert, &[String])] = &[
            (
                Alert::FletchErrorBudgetBurn,
                &[format!("ratio_rate{hour} > {ERRORS_BURN} * {ERRORS_OBJECTIVE}")],
            ),
            (Alert::FletchWrongBytes, &[format!("increase(fletch_corrupt_total[{hour}]) > 0")]),
            (
                Alert::FletchJobStalled,
                &[
                    format!("fletch_job_speed_ratio < {SLOW_SPEED}"),
                    format!("> {SLOW_STALL}"),
                    format!("for: {}", minutes(SLOW_FOR)),
                ],
            ),
            (
                Alert::FletchThrashing,
                &[
                    format!("fletch_origin_read_bytes_total{{of=\"content\"}}[{hour}]"),
                    format!("{THRASHED_READS} * fletch_dataset_bytes{{of=\"version\"}}"),
                    format!("< {THRASHED_SAVED} * sum by (instance, dataset)"),
                    format!("increase(fletch_disk_evicted_bytes_total[{hour}]) > 0"),
                ],
            ),
            (
                Alert::FletchDiskFailing,
                &[
                    format!("increase(fletch_disk_errors_total[{quarter}]) > 0"),
                    format!("increase(fletch_disk_quarantined_total[{hour}]) > 0"),
                ],
            ),
            (Alert::FletchOriginErrors, &["fletch_origin_failing == 1".to_owned()]),
            (
                Alert::FletchOriginThrottled,
                &[
                    format!(
                        "increase(fletch_origin_pauses_total[{}]) > {PAUSES_MAX}",
                        minutes(PAUSES_WITHIN)
                    ),
                    format!("{{error=\"throttled\"}}[{}]) > 0", minutes(PAUSES_WITHIN)),
                ],
            ),
            (Alert::FletchCacheFull, &["fletch_disk_state{state=\"full\"} == 1".to_owned()]),
            // The page knows what mounts announced, and the rules what mounts count.
            (Alert::FletchMountBroken, &[]),
            (Alert::FletchEpochNotExactlyOnce, &[format!("increase(fletch_epoch_faults_total[{hour}]) > 0")]),
            (
                Alert::FletchStateDiskFull,
                &[format!("fletch_state_disk_free_bytes < {STATE_FREE_MIN} * fletch_state_disk_bytes")],
            ),
            (
                Alert::FletchMemoryNearLimit,
                &[format!("fletch_process_memory_bytes > {MEMORY_MAX} * fletch_process_memory_limit_bytes")],
            ),
            (
                Alert::FletchCredentialsExpire,
                &[format!(
                    "fletch_credentials_expire_timestamp_seconds - time() < {} * 60",
                    CREDENTIALS_WITHIN.as_secs() / 60
                )],
            ),
            (Alert::FletchCertificateExpires, &[certificate]),
            (Alert::FletchRefreshFailed, &["fletch_refresh_failed == 1".to_owned()]),
            (
                Alert::FletchJobWaitsForServer,
                &["max by (member) (fletch_cluster_jobs_waiting) > 0".to_owned()],
            ),
        ];
        assert_eq!(all.iter().map(|(alert, _)| *alert).collect::<Vec<_>>(), Alert::ALL, "each alert once");
        for (alert, parts) in all {
            let rules = rules(*alert);
            assert!(!rules.is_empty(), "{} has no rule", alert.as_str());
            for part in *parts {
                let found = rules.iter().any(|rule| rule.contains(part));
                assert!(found, "{part:?} is in no rule of {}: {rules:#?}", alert.as_str());
            }
        }
    }
}
