//! Decides when a server that nobody uses ends by itself. Pure: the caller passes the time.

use std::time::Duration;

/// What a server does at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Activity {
    /// When the last request came, in nanoseconds since the start. Probes do not count.
    pub last_request_ns: u64,
    /// Requests for bytes that run.
    pub running: u64,
    /// Mounts that are announced.
    pub mounts: u64,
    /// Epochs that are open.
    pub epochs: u64,
    /// Warm-ups that wait or run.
    pub warmups: u64,
}

impl Activity {
    fn is_busy(&self) -> bool {
        self.running + self.mounts + self.epochs + self.warmups > 0
    }
}

/// For how long a server was idle.
#[derive(Debug, Clone, Copy, Default)]
pub struct IdleClock {
    /// When the server was last seen busy, in nanoseconds since the start.
    busy_ns: u64,
}

impl IdleClock {
    /// Records what the server does at `now_ns`. Returns for how long it has been idle.
    pub fn observe(&mut self, activity: Activity, now_ns: u64) -> Duration {
        let busy = if activity.is_busy() { now_ns } else { activity.last_request_ns };
        self.busy_ns = self.busy_ns.max(busy);
        Duration::from_nanos(now_ns.saturating_sub(self.busy_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn only_a_server_without_requests_mounts_epochs_and_warmups_is_idle() {
        let seconds = |clock: &mut IdleClock, activity, now: u64| clock.observe(activity, now * S).as_secs();
        let mut clock = IdleClock::default();
        let idle = Activity::default();
        assert_eq!(seconds(&mut clock, idle, 10), 10, "from the start on");
        let asked = Activity { last_request_ns: 8 * S, ..idle };
        assert_eq!(seconds(&mut clock, asked, 12), 4);
        for (i, busy) in [
            Activity { running: 1, ..asked },
            Activity { mounts: 1, ..asked },
            Activity { epochs: 1, ..asked },
            Activity { warmups: 1, ..asked },
        ]
        .into_iter()
        .enumerate()
        {
            let now = 20 + 10 * i as u64;
            assert_eq!(seconds(&mut clock, busy, now), 0, "{busy:?}");
            assert_eq!(seconds(&mut clock, asked, now + 3), 3, "counted from the end of {busy:?}");
        }
        let later = Activity { last_request_ns: 60 * S, ..idle };
        assert_eq!((seconds(&mut clock, later, 61), seconds(&mut clock, later, 90)), (1, 30));
    }
}
