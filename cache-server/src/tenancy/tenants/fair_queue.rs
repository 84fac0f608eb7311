//! Requests of several streams that wait for one link, in the order that shares the link by weight. Pure.
//!
//! A *stream* is what one tenant reads of one dataset. The order is start-time fair queuing (Goyal, Vin and
//! Cheng, 1996). Each request has a start tag: the virtual time at which its stream would begin to send it,
//! if the link sent all streams at once, each at a rate in proportion to its weight. The smallest tag is
//! next, and it becomes the virtual time.
//!
//! Invariants:
//! 1. Of two streams that both wait all the time, one gets at most one request more than its weight says.
//!    So bytes are shared by weighted max-min, whatever the lengths of requests and queues are.
//! 2. The queue never holds back the next request: the order costs no throughput.
//! 3. A stream saves nothing up while it asks for nothing.
//! 4. A request that is withdrawn costs its stream nothing.

use fletch_core::{DatasetName, Domain};
use std::collections::{BTreeMap, VecDeque};

/// What one tenant reads of one dataset.
pub type Stream = (Domain, DatasetName);

/// The requests that wait.
#[derive(Debug)]
pub struct FairQueue<T> {
    /// The start tag of the request that left last.
    virtual_time: f64,
    streams: BTreeMap<Stream, Line<T>>,
}

/// The requests of one stream.
#[derive(Debug)]
struct Line<T> {
    /// The start tag of the first request that waits, or the least tag of the next.
    start: f64,
    waiting: VecDeque<Entry<T>>,
}

#[derive(Debug)]
struct Entry<T> {
    bytes: u32,
    weight: f64,
    item: T,
}

impl<T> Default for FairQueue<T> {
    fn default() -> Self {
        FairQueue { virtual_time: 0.0, streams: BTreeMap::new() }
    }
}

impl<T> FairQueue<T> {
    /// Adds a request for `bytes` bytes. `weight` is above 0.
    pub fn push(&mut self, stream: &Stream, weight: f64, bytes: u32, item: T) {
        let now = self.virtual_time;
        let line = self.streams.entry(stream.clone());
        let line = line.or_insert_with(|| Line { start: now, waiting: VecDeque::new() });
        if line.waiting.is_empty() {
            line.start = line.start.max(now);
        }
        line.waiting.push_back(Entry { bytes, weight, item });
    }

    /// Takes the next request that `is_alive`.
    pub fn pop(&mut self, is_alive: impl Fn(&T) -> bool) -> Option<T> {
        let now = self.virtual_time;
        self.streams.retain(|_, line| {
            while line.waiting.front().is_some_and(|entry| !is_alive(&entry.item)) {
                line.waiting.pop_front();
            }
            // A stream that waits for nothing and is ahead of no other needs no memory.
            !line.waiting.is_empty() || line.start > now
        });
        let waits = self.streams.iter_mut().filter(|(_, line)| !line.waiting.is_empty());
        let (_, line) = waits.min_by(|(_, a), (_, b)| a.start.total_cmp(&b.start))?;
        let Entry { bytes, weight, item } = line.waiting.pop_front()?;
        self.virtual_time = line.start;
        line.start += f64::from(bytes.max(1)) / weight;
        Some(item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stream(i: usize) -> Stream {
        (Domain::new("d").expect("a name"), DatasetName::new(&format!("s{i}")).expect("a name"))
    }

    const DEAD: usize = 7;

    fn pop(queue: &mut FairQueue<usize>) -> Option<usize> {
        queue.pop(|&item| item != DEAD)
    }

    #[test]
    fn a_stream_that_rested_does_not_catch_up() {
        let mut queue = FairQueue::default();
        (0..200).for_each(|_| queue.push(&stream(0), 1.0, 10, 0));
        (0..100).for_each(|_| assert_eq!(pop(&mut queue), Some(0)));
        (0..50).for_each(|_| queue.push(&stream(1), 1.0, 10, 1));
        let next: Vec<_> = (0..40).filter_map(|_| pop(&mut queue)).collect();
        let of_new = next.iter().filter(|&&i| i == 1).count();
        assert!((20..=21).contains(&of_new), "half of what follows, and nothing for its rest: {of_new}");
    }

    #[test]
    fn a_stream_with_one_request_at_a_time_waits_for_one_request_of_a_long_queue() {
        let mut queue = FairQueue::default();
        (0..100).for_each(|_| queue.push(&stream(0), 1.0, 10, 0));
        for _ in 0..20 {
            queue.push(&stream(1), 1.0, 10, 1);
            let first = pop(&mut queue);
            assert!(first == Some(1) || pop(&mut queue) == Some(1));
        }
    }

    #[test]
    fn withdrawn_requests_cost_nothing_and_nobody_is_remembered_for_ever() {
        let mut queue = FairQueue::default();
        (0..10).for_each(|_| queue.push(&stream(0), 1.0, 1000, DEAD));
        queue.push(&stream(1), 1.0, 10, 1);
        queue.push(&stream(0), 1.0, 10, 0);
        assert_eq!([pop(&mut queue), pop(&mut queue), pop(&mut queue)], [Some(0), Some(1), None]);
        queue.push(&stream(2), 1.0, 1, 2);
        (0..20).for_each(|_| queue.push(&stream(3), 1.0, 1, 3));
        while pop(&mut queue).is_some() {}
        assert!(queue.streams.len() <= 2, "{queue:?}");
    }

    proptest! {
        /// Invariant 1, for streams that always have two requests waiting.
        #[test]
        fn streams_that_always_wait_share_by_weight(
            weights in prop::collection::vec(0.1_f64..10.0, 2..6),
            lengths in prop::collection::vec(1_u32..4096, 200..600),
        ) {
            let mut queue = FairQueue::default();
            let mut served = vec![0.0; weights.len()];
            for (i, &weight) in weights.iter().enumerate() {
                (0..2).for_each(|k| queue.push(&stream(i), weight, lengths[k], (i, lengths[k])));
            }
            let longest = f64::from(*lengths.iter().max().expect("some"));
            for &bytes in &lengths {
                let (i, sent) = queue.pop(|_| true).expect("all wait");
                served[i] += f64::from(sent);
                queue.push(&stream(i), weights[i], bytes, (i, bytes));
                for a in 0..weights.len() {
                    for b in 0..weights.len() {
                        let ahead = served[a] / weights[a] - served[b] / weights[b];
                        let most = longest / weights[a] + longest / weights[b];
                        prop_assert!(ahead <= most + 1e-6, "{ahead} {most}");
                    }
                }
            }
        }
    }
}
