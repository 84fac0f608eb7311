//! A training job, its loader and what serves it, in virtual time, a batch at a time. The estimator sees only
//! what acknowledgements carry, and what the server knows of each lease, its link and its disk.

use crate::benefit::{BatchObservation, Served, Window};
use crate::capacity::tests::rng::Rng;
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

/// What can be changed while a job runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Step,
    Preparation,
    Origin,
    Disk,
    Queue,
}

/// A job and what serves it. Times are seconds, rates samples a second.
#[derive(Debug, Clone)]
pub struct Job {
    pub ranks: usize,
    /// Workers of each rank; 0: the loop prepares its batches.
    pub workers: usize,
    /// Batches that a worker may have ready.
    pub prefetch: usize,
    /// Whether a worker receives a batch only after it has prepared the one before.
    pub is_serial: bool,
    pub step: f64,
    /// What the loop does in a step before it gives it to the device.
    pub in_step: f64,
    pub preparation: f64,
    /// Processors that the workers share.
    pub cores: f64,
    /// The spread of all times (log-normal).
    pub jitter: f64,
    pub origin: f64,
    pub disk: f64,
    pub queue: f64,
    /// Whether the server's clocks show the time in its queue.
    pub sees_queue: bool,
    /// The part of the data in the cache.
    pub cached: f64,
    /// Every so many steps, one takes so many times as long.
    pub burst: (usize, f64),
    /// Steps that the host may be ahead of the device; 0: it waits for each.
    pub ahead: usize,
    /// Whether the framework tells the device's times.
    pub device_times: bool,
    /// After every so many steps, a pause of so many seconds.
    pub pause: (usize, f64),
    /// How many times as long the steps of rank 0 take.
    pub slow_rank: f64,
    /// The time to the first byte from the origin.
    pub first_byte: f64,
    /// The probability that the machine stops the loop in a step, or a worker in a batch, for 5 to 50 ms.
    pub stalls: f64,
    /// At these steps, times or rates change by a factor.
    pub changes: Vec<(usize, Part, f64)>,
}

/// The samples of a batch of one rank.
pub const BATCH: f64 = 64.0;

impl Default for Job {
    fn default() -> Self {
        Job {
            ranks: 1,
            workers: 4,
            prefetch: 2,
            is_serial: false,
            step: 0.1,
            in_step: 0.0,
            preparation: 0.1,
            cores: 1e9,
            jitter: 0.2,
            origin: 400.0,
            disk: 8000.0,
            queue: 0.001,
            sees_queue: true,
            cached: 0.35,
            burst: (1, 1.0),
            ahead: 0,
            device_times: false,
            pause: (usize::MAX, 0.0),
            slow_rank: 1.0,
            first_byte: 0.02,
            stalls: 0.0,
            changes: Vec::new(),
        }
    }
}

/// What was observed of a simulated job.
#[derive(Debug, Default)]
pub struct Observed {
    pub batches: Vec<BatchObservation>,
    pub link: Vec<Served>,
    pub disk: Vec<Served>,
}

impl Observed {
    /// Returns the batches of steps `from` to `to`.
    pub fn between(&self, from: usize, to: usize) -> Vec<BatchObservation> {
        let within = |b: &&BatchObservation| (from as u64..to as u64).contains(&b.step);
        self.batches.iter().filter(within).copied().collect()
    }

    pub fn window<'a>(&'a self, job: &Job, batches: &'a [BatchObservation]) -> Window<'a> {
        Window {
            batches,
            link: &self.link,
            disk: &self.disk,
            since: 0.0,
            first_byte: job.first_byte,
            samples: BATCH,
            decodes_in_loop: job.workers == 0,
        }
    }
}

/// A batch on its way.
#[derive(Debug, Clone, Copy, Default)]
struct Batch {
    lane: usize,
    /// How long its lane waited for it.
    received: f64,
    prepared: f64,
    origin: f64,
    disk: f64,
    queue: f64,
    hit_part: f64,
}

#[derive(Debug, Default)]
struct Lane {
    is_receiving: bool,
    coming: Batch,
    received: VecDeque<Batch>,
    /// Since when it could prepare a batch, if it had one.
    waits_since: Option<f64>,
    preparing: Option<Batch>,
    /// The stall of the batch that it receives or prepares.
    stall: (f64, Place),
}

#[derive(Debug, Default)]
struct Rank {
    ready: VecDeque<Batch>,
    /// Batches that its workers prepare or have ready.
    out: usize,
    /// Since when it waits for a batch.
    waits_since: Option<f64>,
    /// Until when the machine stops it.
    stopped_until: f64,
    /// The batch of its next step: since when it waited, when it got it (`None`: it prepares it), the batch.
    next: Option<(f64, Option<f64>, Batch)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Received(usize),
    Prepared(usize),
    /// The loop has prepared the batch of this rank.
    InLoop(usize),
    Stepped,
    /// The machine lets this rank go on.
    GoesOn(usize),
}

/// Where the machine stops a loop or a worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Place {
    /// In the step, or while the worker prepares.
    #[default]
    Busy,
    /// When its wait has ended: while it waits, by its clock.
    Wakes,
    /// Between two times that it measures.
    Between,
}

struct Simulation {
    job: Job,
    rng: Rng,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    count: u64,
    link_free: f64,
    disk_free: f64,
    /// The origin's rate drifts by about 5 %.
    drift: f64,
    lanes: Vec<Lane>,
    ranks: Vec<Rank>,
    steps: usize,
    /// Where the machine stops the loop after its present step.
    stopped: (f64, Place),
    /// When the device ends the steps that the host has given it.
    device: VecDeque<f64>,
    out: Observed,
}

impl Simulation {
    /// Returns a factor of mean 1.
    fn jitter(&mut self, spread: f64) -> f64 {
        (spread * self.rng.normal() - spread * spread / 2.0).exp()
    }

    /// Returns for how long the machine stops a loop or a worker now, and where.
    fn stall(&mut self) -> (f64, Place) {
        if self.job.stalls == 0.0 || self.rng.unit() >= self.job.stalls {
            return (0.0, Place::Busy);
        }
        let place = [Place::Busy, Place::Wakes, Place::Between][self.rng.below(3)];
        (self.rng.between(0.005, 0.05), place)
    }

    fn at(&mut self, time: f64, event: Event) {
        self.count += 1;
        // Times are positive, so their bits have the order of the numbers.
        self.events.push(Reverse((time.to_bits(), self.count, event)));
    }

    /// A lane asks for its next batch, if it has room for one.
    fn receive(&mut self, lane: usize, now: f64) {
        let room = if self.job.workers == 0 { 2 } else { 1 };
        if self.lanes[lane].is_receiving || self.lanes[lane].received.len() >= room {
            return;
        }
        self.lanes[lane].is_receiving = true;
        let spread = self.job.jitter;
        let start = now + self.job.queue * self.jitter(spread);
        let cached = self.job.cached;
        let noise = (BATCH * cached * (1.0 - cached)).sqrt() * self.rng.normal();
        let missing = (BATCH * (1.0 - cached) + noise).clamp(0.0, BATCH).round();
        self.drift = 0.98 * self.drift + 0.01 * self.rng.normal();
        let mut from_origin = start;
        if missing > 0.0 {
            let begun = self.link_free.max(start);
            let factor = (1.0 + self.drift) * self.jitter(spread / 2.0);
            self.link_free = begun + missing / self.job.origin * factor;
            self.out.link.push(Served { start, end: self.link_free, samples: missing });
            from_origin = self.link_free + self.job.first_byte;
        }
        let hits = BATCH - missing;
        let factor = self.jitter(spread / 2.0);
        self.disk_free = self.disk_free.max(start) + hits / self.job.disk * factor;
        self.out.disk.push(Served { start, end: self.disk_free, samples: hits });
        let from_disk = self.disk_free;
        self.lanes[lane].coming = Batch {
            lane,
            received: 0.0,
            prepared: 0.0,
            origin: if from_origin >= from_disk { from_origin - start } else { 0.0 },
            disk: if from_disk > from_origin { from_disk - start } else { 0.0 },
            queue: if self.job.sees_queue { start - now } else { 0.0 },
            hit_part: hits / BATCH,
        };
        let stall = self.stall();
        self.lanes[lane].stall = stall;
        let wakes = if stall.1 == Place::Wakes { stall.0 } else { 0.0 };
        self.at(from_origin.max(from_disk) + wakes, Event::Received(lane));
    }

    /// A worker prepares its next batch, if its rank has room for one.
    fn prepare(&mut self, lane: usize, now: f64) {
        if self.job.workers == 0 {
            return;
        }
        let rank = lane / self.job.workers;
        let has_room = self.ranks[rank].out < self.job.workers * self.job.prefetch;
        let could_prepare = self.lanes[lane].preparing.is_none() && has_room;
        if could_prepare {
            self.lanes[lane].waits_since.get_or_insert(now);
        }
        if could_prepare && let Some(mut batch) = self.lanes[lane].received.pop_front() {
            self.lanes[lane].waits_since = None;
            let busy = 1.0 + self.lanes.iter().filter(|l| l.preparing.is_some()).count() as f64;
            let spread = self.job.jitter;
            let crowded = (busy / self.job.cores).max(1.0);
            batch.prepared = self.job.preparation * self.jitter(spread) * crowded;
            self.ranks[rank].out += 1;
            let (stall, place) = self.lanes[lane].stall;
            batch.prepared += if place == Place::Busy { stall } else { 0.0 };
            let between = if place == Place::Between { stall } else { 0.0 };
            self.lanes[lane].preparing = Some(batch);
            self.at(now + batch.prepared + between, Event::Prepared(lane));
        }
        if self.lanes[lane].waits_since.is_some() || !self.job.is_serial {
            self.receive(lane, now);
        }
    }

    /// A rank that waits takes a batch. When all ranks have one, they step.
    fn take(&mut self, rank: usize, now: f64) {
        let Some(since) = self.ranks[rank].waits_since else { return };
        if now < self.ranks[rank].stopped_until {
            return;
        }
        if self.job.workers == 0 {
            let Some(mut batch) = self.lanes[rank].received.pop_front() else { return };
            let spread = self.job.jitter;
            batch.received = now - since;
            batch.prepared = self.job.preparation * self.jitter(spread);
            self.ranks[rank].waits_since = None;
            self.receive(rank, now);
            self.ranks[rank].next = Some((since, None, batch));
            self.at(now + batch.prepared, Event::InLoop(rank));
            return;
        }
        let Some(batch) = self.ranks[rank].ready.pop_front() else { return };
        let r = &mut self.ranks[rank];
        r.out -= 1;
        (r.waits_since, r.next) = (None, Some((since, Some(now), batch)));
        for worker in 0..self.job.workers {
            self.prepare(rank * self.job.workers + worker, now);
        }
        self.step(now);
    }

    fn step(&mut self, now: f64) {
        let nexts: Option<Vec<(f64, f64, Batch)>> =
            self.ranks.iter().map(|r| r.next.and_then(|(since, got, b)| Some((since, got?, b)))).collect();
        let Some(nexts) = nexts else { return };
        let is_burst = self.steps.is_multiple_of(self.job.burst.0);
        let length = self.job.step * if is_burst { self.job.burst.1 } else { 1.0 };
        let mut end = now;
        for (rank, next) in nexts.iter().enumerate() {
            let slow = if rank == 0 { self.job.slow_rank } else { 1.0 };
            let spread = self.job.jitter;
            end = end.max(next.1 + length * self.jitter(spread / 4.0) * slow);
        }
        let device = end - now;
        let in_step = match self.job.in_step {
            0.0 => 0.0,
            mean => mean * self.jitter(self.job.jitter),
        };
        end += in_step;
        let stall = self.stall();
        end += if stall.1 == Place::Busy { stall.0 } else { 0.0 };
        self.stopped = if stall.1 == Place::Busy { (0.0, Place::Busy) } else { stall };
        if self.job.ahead > 0 {
            // The host goes on after it has launched the step.
            let launched = now + in_step;
            let done = self.device.back().copied().unwrap_or(0.0).max(launched) + device;
            self.device.push_back(done);
            end = launched + 0.01 * self.job.step;
            if self.device.len() > self.job.ahead {
                end = end.max(self.device.pop_front().expect("a step of the device"));
            }
        }
        if self.steps % self.job.pause.0 == self.job.pause.0 - 1 {
            end += self.job.pause.1;
        }
        for (rank, (since, got, batch)) in nexts.into_iter().enumerate() {
            self.out.batches.push(BatchObservation {
                step: self.steps as u64,
                rank: u32::try_from(rank).expect("few"),
                lane: u32::try_from(batch.lane).expect("few"),
                ended: end,
                waited: got - since,
                received: Some(batch.received),
                prepared: batch.prepared,
                stepped: end - got,
                device: self.job.device_times.then_some(device),
                origin: batch.origin,
                disk: batch.disk,
                queue: batch.queue,
                hit_part: batch.hit_part,
            });
        }
        self.at(end, Event::Stepped);
    }

    fn change(&mut self) {
        for (at, part, factor) in self.job.changes.clone() {
            if at == self.steps {
                let value = match part {
                    Part::Step => &mut self.job.step,
                    Part::Preparation => &mut self.job.preparation,
                    Part::Origin => &mut self.job.origin,
                    Part::Disk => &mut self.job.disk,
                    Part::Queue => &mut self.job.queue,
                };
                *value *= factor;
            }
        }
    }

    fn handle(&mut self, event: Event, now: f64) {
        match event {
            Event::Received(lane) => {
                self.lanes[lane].is_receiving = false;
                let mut batch = self.lanes[lane].coming;
                batch.received = self.lanes[lane].waits_since.map_or(0.0, |since| now - since);
                self.lanes[lane].received.push_back(batch);
                if self.job.workers == 0 {
                    self.receive(lane, now);
                    self.take(lane, now);
                } else {
                    self.prepare(lane, now);
                }
            }
            Event::Prepared(lane) => {
                let batch = self.lanes[lane].preparing.take().expect("a batch");
                let rank = lane / self.job.workers;
                self.ranks[rank].ready.push_back(batch);
                self.prepare(lane, now);
                self.take(rank, now);
            }
            Event::InLoop(rank) => {
                if let Some((_, got, _)) = &mut self.ranks[rank].next {
                    *got = Some(now);
                }
                self.step(now);
            }
            Event::Stepped => {
                self.steps += 1;
                self.change();
                let (stall, place) = self.stopped;
                let asks = now + if place == Place::Between { stall } else { 0.0 };
                for rank in &mut self.ranks {
                    (rank.next, rank.waits_since, rank.stopped_until) = (None, Some(asks), now + stall);
                }
                for rank in 0..self.ranks.len() {
                    if stall > 0.0 {
                        self.at(now + stall, Event::GoesOn(rank));
                    } else {
                        self.take(rank, now);
                    }
                }
            }
            Event::GoesOn(rank) => self.take(rank, now),
        }
    }
}

/// Simulates so many steps of a job.
pub fn simulate(job: &Job, steps: usize, seed: u64) -> Observed {
    let lanes = job.ranks * job.workers.max(1);
    let waiting = || Rank { waits_since: Some(0.0), ..Rank::default() };
    let mut simulation = Simulation {
        job: job.clone(),
        rng: Rng(seed),
        events: BinaryHeap::new(),
        count: 0,
        link_free: 0.0,
        disk_free: 0.0,
        drift: 0.0,
        lanes: (0..lanes).map(|_| Lane::default()).collect(),
        ranks: (0..job.ranks).map(|_| waiting()).collect(),
        steps: 0,
        stopped: (0.0, Place::Busy),
        device: VecDeque::new(),
        out: Observed::default(),
    };
    for lane in 0..lanes {
        match job.workers {
            0 => simulation.receive(lane, 0.0),
            _ => simulation.prepare(lane, 0.0),
        }
    }
    while simulation.steps < steps {
        let Some(Reverse((time, _, event))) = simulation.events.pop() else { break };
        simulation.handle(event, f64::from_bits(time));
    }
    simulation.out
}

/// Returns the rate of a job in its steady state, pauses apart.
pub fn pace(job: &Job, seed: u64) -> f64 {
    let (warm, steps) = (600, 2400);
    let observed = simulate(job, warm + steps, seed);
    let end = |step: usize| {
        let of_step = observed.batches.iter().filter(|b| b.step == step as u64);
        of_step.map(|b| b.ended).fold(0.0, f64::max)
    };
    let pauses = (steps / job.pause.0) as f64 * job.pause.1;
    BATCH * job.ranks as f64 * steps as f64 / (end(warm + steps - 1) - end(warm - 1) - pauses)
}
