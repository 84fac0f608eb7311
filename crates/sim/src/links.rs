//! Links: when requested bytes arrive. Each link serves its requests in the order in which they come.

use crate::case::{Network, Origin};
use std::{cmp::Reverse, collections::BinaryHeap};

/// A time with a total order. All times of a simulation are finite.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Time(f64);

impl Eq for Time {}

impl PartialOrd for Time {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Time {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// The link to the origin, with a bandwidth and a latency. The origin may limit concurrent requests and
/// requests a second.
#[derive(Debug, Clone)]
pub struct OriginLink {
    origin: Option<Origin>,
    /// Time at which the link has delivered all requests.
    free: f64,
    /// Earliest start of the next request under the origin's rate of requests.
    next: f64,
    /// End times of the requests under way.
    under_way: BinaryHeap<Reverse<Time>>,
}

impl OriginLink {
    pub(crate) fn new(origin: Option<Origin>) -> Self {
        OriginLink { origin, free: 0.0, next: 0.0, under_way: BinaryHeap::new() }
    }

    /// Returns whether the link is idle. A link without an origin never is: a fetch takes no time there.
    pub(crate) fn idle(&self, now: f64, samples: u64) -> bool {
        self.origin.is_some_and(|o| self.free <= now + o.latency + samples as f64 / o.bandwidth)
    }

    /// Returns the samples' worth of requests that fill the link, at most `most`.
    pub(crate) fn fill(&self, most: u64) -> u64 {
        self.origin.map_or(u64::MAX, |o| in_flight(o.bandwidth, o.latency, 1, most))
    }

    /// Requests `samples` samples' worth of bytes, and returns the time at which they arrive.
    pub(crate) fn request(&mut self, now: f64, samples: u64) -> f64 {
        let Some(o) = self.origin else { return now };
        let mut start = now;
        if let Some(rate) = o.requests_per_second {
            start = start.max(self.next);
            self.next = start + 1.0 / rate;
        }
        if let Some(most) = o.requests {
            while self.under_way.len() >= most as usize
                && let Some(Reverse(Time(ends))) = self.under_way.pop()
            {
                start = start.max(ends);
            }
        }
        self.free = self.free.max(start + o.latency) + samples as f64 / o.bandwidth;
        if o.requests.is_some() {
            self.under_way.push(Reverse(Time(self.free)));
        }
        self.free
    }
}

/// The link from one server to the jobs.
#[derive(Debug, Clone, Default)]
pub(crate) struct ServerLink {
    network: Option<Network>,
    free: f64,
}

impl ServerLink {
    pub(crate) fn new(network: Option<Network>) -> Self {
        ServerLink { network, free: 0.0 }
    }

    /// Returns the time at which a sample reaches its job, if it is at the server at `there` (not before
    /// `now`).
    pub(crate) fn deliver(&mut self, now: f64, there: f64) -> f64 {
        let Some(n) = self.network else { return there };
        let each = 1.0 / n.bandwidth;
        if there > now {
            // Still on its way to the server, so its place in the link's queue is unknown.
            return there + each + n.latency;
        }
        self.free = self.free.max(now) + each;
        self.free + n.latency
    }
}

/// Returns the bytes to keep in flight on a link of `bandwidth` bytes a second and `latency` seconds: twice
/// what the link holds, at least one unit of `unit` bytes, at most `most`.
fn in_flight(bandwidth: f64, latency: f64, unit: u64, most: u64) -> u64 {
    let link = (2.0 * bandwidth * latency).max(0.0);
    (link as u64).max(unit).min(most.max(unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_in_flight() {
        assert_eq!(in_flight(1e9, 0.025, 4 << 20, 1 << 30), 50_000_000);
        assert_eq!(in_flight(1e6, 0.001, 4 << 20, 1 << 30), 4 << 20);
        assert_eq!(in_flight(1e12, 1.0, 4 << 20, 1 << 30), 1 << 30);
        assert_eq!(in_flight(f64::NAN, 1.0, 1, 10), 1);
    }
}
