//! A strict job beside substituted ones. `fletch_core::order::Strict` says what it reads, and
//! `fletch_core::prefetch` what is prefetched for it. It never changes what the shared cache holds.

use super::{Granted, OriginLink};
use crate::{Case, statistics::Statistics};
use fletch_core::{
    order::Strict,
    plan::{OrderKey, Plan, PlanUnits, Tail, UnitMap, World},
    prefetch::{Prefetch, Uses},
    residency::CacheAction,
};
use std::collections::VecDeque;

/// A job with a fixed order and its own prefetch buffer.
#[derive(Debug)]
pub(super) struct StrictJob {
    budget: u64,
    block: u32,
    sizes: Vec<u32>,
    /// The epoch's samples in order.
    order: Vec<u32>,
    /// Position of the next sample in `order`.
    at: u64,
    prefetch: Option<Prefetch>,
    /// Of each unit that it holds: when it arrives, when it was requested, whether it was used.
    held: Vec<Option<(f64, f64, bool)>>,
    /// Loads under way: when they arrive, and their length in samples.
    under_way: VecDeque<(f64, u64)>,
    actions: Vec<CacheAction>,
}

impl StrictJob {
    pub(super) fn new(case: &Case, j: usize) -> Self {
        let spec = &case.jobs[j];
        StrictJob {
            budget: spec.prefetch,
            block: spec.block,
            sizes: case.units.clone(),
            order: Vec::new(),
            at: 0,
            prefetch: None,
            held: if spec.prefetch > 0 { vec![None; case.units.len()] } else { Vec::new() },
            under_way: VecDeque::new(),
            actions: Vec::new(),
        }
    }

    /// Starts an epoch, and drops what was held for the last one.
    pub(super) fn begin(&mut self, unit_map: &UnitMap, key: &OrderKey, stats: &mut Statistics, j: usize) {
        let b = &stats.jobs[j];
        let chosen: Vec<u64> = b.plan.iter_in(0, b.plan.len()).collect();
        let plan = Plan::subset(b.plan.len(), chosen.iter().copied()).expect("a plan has samples");
        let world = World { batch: 1, ranks: 1, tail: Tail::Keep };
        let strict = if self.block > 0 {
            let plan_units = PlanUnits::new(&plan, unit_map).expect("plan and unit_map are of one case");
            Strict::by_units(plan, world, *key, plan_units, self.block)
        } else {
            Strict::new(plan, world, *key)
        };
        self.order = (0..strict.len()).map(|p| strict.item(strict.entry(p)).sample).collect();
        self.at = 0;
        if self.budget > 0 {
            let unit_at = self.order.iter().map(|&s| stats.unit_of[s as usize]).collect();
            let uses = Uses::new(unit_at, self.sizes.len()).expect("units of the case");
            let bytes = self.sizes.iter().map(|&g| u64::from(g)).collect();
            self.prefetch = Some(Prefetch::new(uses, bytes, self.budget));
            self.held.fill(None);
            self.under_way.clear();
        }
    }

    /// Grants its next sample. `shared` returns when a unit of the shared cache arrives, and when it was
    /// requested.
    pub(super) fn grant(
        &mut self,
        now: f64,
        link: &mut OriginLink,
        stats: &mut Statistics,
        shared: impl Fn(u32) -> Option<(f64, f64)>,
    ) -> Option<Granted> {
        let sample = *self.order.get(usize::try_from(self.at).unwrap_or(usize::MAX))?;
        let unit = stats.unit_of[sample as usize];
        if let Some(p) = &mut self.prefetch {
            // What was in the shared cache when it was looked at may have left it since.
            if !p.holds(unit) && shared(unit).is_none() {
                p.lost(unit);
            }
            while self.under_way.front().is_some_and(|w| w.0 <= now) {
                self.under_way.pop_front();
            }
            // Others use the link too: no more is under way at once than fills it.
            while self.under_way.iter().map(|w| w.1).sum::<u64>() < link.fill(self.budget) {
                let before = p.ahead();
                p.advance(before + 1, |u| shared(u).is_some(), &mut self.actions);
                for action in self.actions.drain(..) {
                    match action {
                        CacheAction::Load(u) => {
                            let size = u64::from(self.sizes[u as usize]);
                            stats.fetched(now, size, false);
                            let here = link.request(now, size);
                            self.held[u as usize] = Some((here, now, false));
                            self.under_way.extend((here > now).then_some((here, size)));
                        }
                        CacheAction::Evict(u) => {
                            let held = self.held[u as usize].take();
                            stats.vain(now, held.is_some_and(|h| !h.2), u64::from(self.sizes[u as usize]));
                        }
                    }
                }
                if p.ahead() == before {
                    break;
                }
            }
            p.serve(self.at);
        }
        self.at += 1;
        let own = self.held.get_mut(unit as usize).and_then(Option::as_mut).map(|h| {
            h.2 = true;
            (h.0, h.1)
        });
        Some(match own.or_else(|| shared(unit)) {
            Some((here, asked)) => Granted { sample, arrives: here.max(now), asked, forced: asked == now },
            None => {
                stats.fetched(now, 1, true);
                Granted { sample, arrives: link.request(now, 1), asked: now, forced: true }
            }
        })
    }

    pub(super) fn leave(&mut self) {
        self.order.clear();
        self.prefetch = None;
    }
}
