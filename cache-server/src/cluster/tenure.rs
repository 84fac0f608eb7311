//! Until when this server may act as the primary of its groups.
//!
//! ```text
//! keep-alive sent ──▶ etcd renews ──▶ own key read back: the tenure lasts until sent + ttl − margin
//!                                     lapsed, or another lease before: another tenure begins
//! ```
//! I1. A tenure ends before the lease can end in etcd: it counts from before the renewal was sent, on a clock
//!     that goes on while the machine is suspended. So no other server takes a group over during a tenure.
//! I2. A tenure that lapsed never goes on. The next one has another number, and whoever holds what it read in
//!     an earlier tenure reads it again.

use fletch_host::clock::BootTime;
use parking_lot::Mutex;
use std::time::Duration;
use tokio::sync::watch;

/// How long before the end of a lease its tenure ends: for clocks that differ, and for the way of an answer.
const MARGIN: Duration = Duration::from_secs(2);

/// A tenure that lasts now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tenure {
    pub number: u64,
    /// How long the lease lives at least. No other server takes a group over until then.
    pub valid: Duration,
}

#[derive(Debug, Default)]
struct State {
    /// The revision by which the own key lies under the lease, and when its last renewal was sent.
    renewed: Option<(u64, BootTime)>,
}

/// The tenures of a member.
#[derive(Debug)]
pub struct Tenures {
    member_ttl: Duration,
    state: Mutex<State>,
    /// The number of the latest tenure. 0: none yet.
    number: watch::Sender<u64>,
}

impl Tenures {
    /// Returns the tenures of a member whose lease lives for `member_ttl`.
    pub fn new(member_ttl: Duration) -> Self {
        Tenures { member_ttl, state: Mutex::default(), number: watch::Sender::new(0) }
    }

    /// Returns how long a tenure lasts after its renewal. Short leases have a smaller margin.
    fn length(&self) -> Duration {
        self.member_ttl - MARGIN.min(self.member_ttl / 5)
    }

    /// Notes that etcd has this member's key, by the revision `put_at`, under a lease whose renewal was sent
    /// at `sent`.
    pub fn renew(&self, put_at: u64, sent: BootTime) {
        let mut state = self.state.lock();
        let goes_on = matches!(state.renewed, Some((at, then))
            if at == put_at && BootTime::now().since(then) < self.length());
        state.renewed = Some((put_at, sent));
        if !goes_on {
            self.number.send_modify(|number| *number += 1);
        }
    }

    /// Ends the tenure: the lease is gone, or is about to be given back.
    pub fn end(&self) {
        self.state.lock().renewed = None;
    }

    /// Returns the tenure, if it lasts now.
    pub fn now(&self) -> Option<Tenure> {
        let state = self.state.lock();
        let age = state.renewed?.1.elapsed();
        let number = *self.number.borrow();
        (age < self.length()).then(|| Tenure { number, valid: self.member_ttl.saturating_sub(age) })
    }

    /// Returns the numbers of the tenures as they begin.
    pub fn numbers(&self) -> watch::Receiver<u64> {
        self.number.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ago(ms: u64) -> BootTime {
        BootTime::now().before(Duration::from_millis(ms))
    }

    #[test]
    fn a_tenure_ends_before_its_lease_and_never_goes_on() {
        let tenures = Tenures::new(Duration::from_secs(10));
        assert_eq!(tenures.now(), None, "there was no renewal");
        tenures.renew(7, ago(100));
        let first = tenures.now().expect("it lasts");
        assert!(first.number == 1 && first.valid <= Duration::from_millis(9_900), "{first:?}");
        tenures.renew(7, ago(7_000));
        let same = tenures.now().expect("it lasts");
        assert!(same.number == 1 && same.valid <= Duration::from_secs(3), "{same:?}");
        tenures.renew(7, ago(8_001));
        assert_eq!(tenures.now(), None, "the answer came too late");
        tenures.renew(7, ago(0));
        assert_eq!(tenures.now().expect("it lasts").number, 2, "it lapsed meanwhile");
        tenures.renew(9, ago(0));
        assert_eq!(tenures.now().expect("it lasts").number, 3, "the key lies under another lease");
        tenures.end();
        assert_eq!(tenures.now(), None);
        tenures.renew(9, ago(0));
        assert_eq!(tenures.now().expect("it lasts").number, 4);
    }

    #[test]
    fn a_short_lease_has_a_shorter_margin() {
        let tenures = Tenures::new(Duration::from_secs(2));
        tenures.renew(1, ago(1_500));
        assert!(tenures.now().is_some());
        tenures.renew(1, ago(1_601));
        assert_eq!(tenures.now(), None);
    }
}
