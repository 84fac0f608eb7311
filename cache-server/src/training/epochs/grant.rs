//! Granting leases: which entries a rank gets for a request.
//!
//! A lease counts as granted when its grant is durable. Until then its entries may already be sent: the
//! caller ends the answer only after [`Recorded::durable`]. If the ledger fails, the grant never happened.

use super::{Epoch, Inner, JobError, acks::Reported, ledger::Recorded};
use crate::training::sweep::DeliveryClass;
use fletch_api::{
    LeaseRequest,
    epochs::{GrantStatus, WANT_MAX},
};
use fletch_core::{
    delivery::{Event, Request, Room},
    plan::Item,
};
use std::{
    sync::atomic::Ordering::Relaxed,
    time::{Duration, Instant},
};

/// The answer to a lease request.
#[derive(Debug, Clone)]
pub struct Granted {
    /// Granted, or why not.
    pub status: GrantStatus,
    /// The lease's number; 0 without a lease.
    pub lease: u64,
    /// Whether the same request was granted this lease before.
    pub again: bool,
    /// The entries of the lease: number, sample and class.
    pub entries: Vec<(u32, Item, DeliveryClass)>,
    /// Entries that the rank may still be granted.
    pub left: u64,
    /// How long the answer waited for acks that free room.
    pub held: Duration,
}

/// One attempt to answer, with the ledger length that has to be durable first.
enum Step {
    Answer(Granted, u64),
    Wait(Granted, u64),
}

impl Epoch {
    /// Grants the next entries to a rank's worker. While an ack could free room, waits for it until `until`.
    ///
    /// Returns a lease before its grant and the request's acks are durable, and every other answer after
    /// that.
    ///
    /// # Errors
    /// [`JobError`]; nothing was granted.
    pub async fn lease(&self, ask: &LeaseRequest, until: Instant) -> Result<(Granted, Recorded), JobError> {
        Self::check_want(ask)?;
        let mut reported = Reported { acks: &ask.acks, release: &ask.release, renew: &ask.renew };
        let mut held = Duration::ZERO;
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let step = self.step(ask, reported)?;
            reported = Reported { renew: &ask.renew, ..Reported::default() };
            let (answer, upto) = match step {
                Step::Wait(answer, upto) if Instant::now() < until => {
                    self.ledger.durable(upto).await?;
                    let begun = Instant::now();
                    if tokio::time::timeout_at(until.into(), changed).await.is_ok() {
                        held += begun.elapsed();
                        continue;
                    }
                    (answer, upto)
                }
                Step::Wait(answer, upto) | Step::Answer(answer, upto) => (answer, upto),
            };
            let recorded = self.ledger.record(upto);
            if answer.status != GrantStatus::Granted {
                recorded.durable().await?;
            }
            return Ok((Granted { held, ..answer }, recorded));
        }
    }

    /// Checks the number of entries that a request wants.
    ///
    /// # Errors
    /// [`JobError::TooLarge`].
    pub fn check_want(ask: &LeaseRequest) -> Result<(), JobError> {
        if (1..=WANT_MAX).contains(&ask.want) {
            return Ok(());
        }
        Err(JobError::TooLarge(format!("want is {}; a lease has 1 to {WANT_MAX} entries", ask.want)))
    }

    fn step(&self, ask: &LeaseRequest, reported: Reported) -> Result<Step, JobError> {
        let mut inner = self.lock();
        let inner = &mut *inner;
        self.is_open(inner)?;
        let mut events = self.expire_due(inner);
        let request = Request { rank: ask.rank, worker: ask.worker, sequence: ask.sequence };
        let checked = self
            .check(inner, ask.rank, reported)
            .and_then(|()| Ok(inner.leases.room(request, ask.want, self.held_max())?));
        if let Err(e) = checked {
            self.ledger.append(&events);
            return Err(e);
        }
        let step = self.answer(inner, ask, request, reported, &mut events);
        // Events that were applied are written even if the request is rejected.
        let upto = self.ledger.append(&events);
        step.map(|s| match s {
            Step::Answer(g, _) => Step::Answer(g, upto),
            Step::Wait(g, _) => Step::Wait(g, upto),
        })
    }

    fn answer(
        &self,
        inner: &mut Inner,
        ask: &LeaseRequest,
        request: Request,
        reported: Reported,
        events: &mut Vec<Event>,
    ) -> Result<Step, JobError> {
        self.apply(inner, (ask.rank, ask.loader.as_ref()), reported.acks, events)?;
        self.release(inner, ask.rank, reported.release, events)?;
        self.renew(inner, ask.rank, reported.renew);
        if self.at_most_once() {
            // A worker that asks for more has received its earlier leases, or will not ask for them again.
            let before =
                |r: &Request| (r.rank, r.worker) == (ask.rank, ask.worker) && r.sequence < ask.sequence;
            self.deliver(inner, |l| before(&l.request), events);
        }
        let room = inner.leases.room(request, ask.want, self.held_max())?;
        let none = |inner: &Inner, status| Granted {
            status,
            lease: 0,
            again: false,
            entries: Vec::new(),
            left: inner.leases.left(ask.rank),
            held: Duration::ZERO,
        };
        Ok(match room {
            Room::Again(lease) => Step::Answer(self.granted(inner, lease, true), 0),
            Room::Done if inner.leases.held(ask.rank) > 0 => Step::Answer(none(inner, GrantStatus::Last), 0),
            Room::Done => Step::Answer(none(inner, GrantStatus::Done), 0),
            Room::Full => Step::Wait(none(inner, GrantStatus::Full), 0),
            Room::Grant(n) => {
                if self.is_full() {
                    return Err(JobError::LedgerFull {
                        epoch: self.number(),
                        most: self.setup.context.ledger_bytes,
                    });
                }
                self.check_state_bytes()?;
                let lease = self.grant(inner, request, n, events)?;
                Step::Answer(self.granted(inner, lease, false), 0)
            }
        })
    }

    /// Lets the sequence choose entries and makes them a lease.
    fn grant(
        &self,
        inner: &mut Inner,
        request: Request,
        n: u32,
        events: &mut Vec<Event>,
    ) -> Result<u64, JobError> {
        self.start_prefetch(inner);
        let (entries, mut classes, from) = inner.sequence.choose(self, &inner.leases, request.rank, n);
        let event = inner.leases.grant(request, entries, n, self.expires_ms())?;
        let lease = inner.leases.last_id();
        inner.sequence.granted(lease, request.rank, from);
        if let Event::Grant { entries, .. } = &event {
            if let Some(ahead) = &inner.prefetcher {
                ahead.granted(entries);
            }
            // Pads that fill up a last step.
            classes.resize(entries.len(), DeliveryClass::Exact);
            for &e in entries {
                let unit = self.setup.samples.unit(self.schedule.item(e).sample);
                inner.shuffles[request.rank as usize].see(unit);
            }
        }
        self.setup.context.counts.granted.fetch_add(classes.len() as u64, Relaxed);
        inner.classes.insert(lease, classes);
        events.push(event);
        Ok(lease)
    }

    fn granted(&self, inner: &mut Inner, lease: u64, again: bool) -> Granted {
        let Some(l) = inner.leases.lease(lease) else {
            let (entries, held) = (Vec::new(), Duration::ZERO);
            return Granted { status: GrantStatus::Full, lease: 0, again, entries, left: 0, held };
        };
        let (entries, rank) = (l.entries.clone(), l.request.rank);
        let known = inner.classes.get(&lease);
        let entries = entries
            .into_iter()
            .enumerate()
            .map(|(i, e)| {
                let item = self.schedule.item(e);
                let class = known.and_then(|c| c.get(i).copied());
                (e, item, class.unwrap_or_else(|| self.class_now(item)))
            })
            .collect();
        inner.leases.renew_one(rank, lease, self.expires_ms());
        let (left, held) = (inner.leases.left(rank), Duration::ZERO);
        Granted { status: GrantStatus::Granted, lease, again, entries, left, held }
    }

    fn class_now(&self, item: Item) -> DeliveryClass {
        self.setup.sweep.as_ref().map_or(DeliveryClass::Exact, |w| w.class_of(item.sample, self.owner))
    }
}
