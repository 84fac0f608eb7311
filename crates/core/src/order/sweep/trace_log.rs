//! The tape of a trace: calls to a sweep and what came of them, as bytes ([`super::trace`]).

use super::{Pick, ReadFrom, SubscriberId, SweepPolicy};
use crate::residency::CacheAction;
use crate::{
    plan::{
        bits::Bits,
        unit_map::{PlanUnits, UnitMap},
    },
    record,
    residency::Residency,
    varint::{get, get_list, get32, put, put_list, take},
};

/// A tape that nobody takes is no longer, in bytes.
pub const TRACE_LOG_BYTES_MAX: usize = 64 << 20;
/// Calls are written in records of about this many bytes; a single one is no longer than 8 MiB.
const RECORD_BYTES: usize = 64 << 10;
const CALL_BYTES_MAX: usize = 8 << 20;
/// Entries of a plan in one list.
const PIECE: usize = 65_536;

pub(super) const CALLS: u8 = 4;
pub(super) const CUT: u8 = 5;

/// A call that changes a sweep.
#[derive(Debug, Clone)]
pub enum Call {
    /// [`SweepPolicy::set_capacity`].
    Capacity {
        /// The new one.
        bytes: u64,
    },
    /// [`SweepPolicy::adopt`].
    Adopt {
        /// What was here.
        residency: Residency,
    },
    /// [`SweepPolicy::join`].
    Join {
        /// The job's plan.
        plan_units: PlanUnits,
    },
    /// [`SweepPolicy::leave`].
    Leave {
        /// Whose.
        subscriber: SubscriberId,
    },
    /// [`SweepPolicy::begin`].
    Begin {
        /// Whose.
        subscriber: SubscriberId,
        /// What is to be handed out.
        left: Bits,
    },
    /// [`SweepPolicy::next`].
    Next {
        /// Whose.
        subscriber: SubscriberId,
    },
    /// [`SweepPolicy::advance`].
    Advance,
    /// [`SweepPolicy::give_back`].
    GiveBack {
        /// Whose.
        subscriber: SubscriberId,
        /// Which slot.
        slot: u32,
    },
    /// [`SweepPolicy::lost`].
    Lost {
        /// Which unit.
        unit: u32,
    },
    /// [`SweepPolicy::reconcile`].
    Reconcile {
        /// What was here.
        residency: Residency,
        /// As of which position of the sweep.
        as_of: u64,
    },
}

/// What came of a call.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CallResult {
    /// The subscriber of who joined.
    pub subscriber: Option<SubscriberId>,
    /// What was handed out.
    pub pick: Option<Pick>,
    /// Whether the sweep was moved.
    pub moved: bool,
    /// The orders to the store.
    pub actions: Vec<CacheAction>,
}

impl CallResult {
    pub(super) fn actions(actions: &[CacheAction]) -> Self {
        CallResult { actions: actions.to_vec(), ..CallResult::default() }
    }

    fn write(&self, out: &mut Vec<u8>) {
        put(out, self.subscriber.map_or(0, |s| u64::from(s.0) + 1));
        match self.pick {
            None => out.push(0),
            Some(p) => {
                out.push(match p.read_from {
                    ReadFrom::Window => 1,
                    ReadFrom::Reserve => 2,
                    ReadFrom::Range => 3,
                });
                put_all(out, &[u64::from(p.slot), u64::from(p.unit), u64::from(p.pass)]);
            }
        }
        out.push(u8::from(self.moved));
        put(out, self.actions.len() as u64);
        for action in &self.actions {
            put(
                out,
                match *action {
                    CacheAction::Evict(u) => u64::from(u) << 1,
                    CacheAction::Load(u) => u64::from(u) << 1 | 1,
                },
            );
        }
    }

    pub(super) fn read(at: &mut &[u8]) -> Option<Self> {
        let subscriber = match get(at)? {
            0 => None,
            n => Some(SubscriberId(u32::try_from(n - 1).ok()?)),
        };
        let read_from = match take(at, 1)?[0] {
            0 => None,
            1 => Some(ReadFrom::Window),
            2 => Some(ReadFrom::Reserve),
            3 => Some(ReadFrom::Range),
            _ => return None,
        };
        let pick = match read_from {
            None => None,
            Some(read_from) => Some(Pick { slot: get32(at)?, unit: get32(at)?, read_from, pass: get32(at)? }),
        };
        let moved = match take(at, 1)?[0] {
            x @ 0..2 => x == 1,
            _ => return None,
        };
        let n = get(at)?;
        // Each takes at least one byte.
        let n = usize::try_from(n).ok().filter(|&n| n <= at.len())?;
        let action = |x: u64| {
            u32::try_from(x >> 1)
                .ok()
                .map(|u| if x & 1 == 1 { CacheAction::Load(u) } else { CacheAction::Evict(u) })
        };
        let actions = (0..n).map(|_| action(get(at)?)).collect::<Option<_>>()?;
        Some(CallResult { subscriber, pick, moved, actions })
    }
}

pub(super) fn put_all(out: &mut Vec<u8>, values: &[u64]) {
    values.iter().for_each(|&x| put(out, x));
}

fn put_bits(out: &mut Vec<u8>, bits: &Bits) {
    put(out, bits.len());
    out.push(u8::from(bits.count() == bits.len()));
    if bits.count() < bits.len() {
        out.extend_from_slice(&bits.to_bytes());
    }
}

fn get_bits(at: &mut &[u8], len: u64) -> Option<Bits> {
    if get(at)? != len {
        return None;
    }
    match take(at, 1)?[0] {
        1 => Some(Bits::ones(len)),
        0 => Bits::from_bytes(len, take(at, usize::try_from(len.div_ceil(8)).ok()?)?),
        _ => None,
    }
}

fn put_residency(out: &mut Vec<u8>, r: &Residency) {
    put(out, r.version());
    put_bits(out, r.units());
}

fn get_residency(at: &mut &[u8], units: u64) -> Option<Residency> {
    Some(Residency::new(get(at)?, get_bits(at, units)?))
}

impl Call {
    fn write(&self, unit_map: &UnitMap, out: &mut Vec<u8>) {
        let subscriber = |s: &SubscriberId| u64::from(s.0);
        match self {
            Call::Capacity { bytes } => put_all(out, &[0, *bytes]),
            Call::Adopt { residency } => {
                put(out, 1);
                put_residency(out, residency);
            }
            Call::Join { plan_units } if plan_units.is_all_of(unit_map) => put_all(out, &[2, 0]),
            Call::Join { plan_units } => {
                put_all(out, &[2, 1]);
                (0..plan_units.units()).for_each(|u| put(out, plan_units.of_unit(u).len() as u64));
                let entries: Vec<u32> = (0..plan_units.slots()).map(|s| plan_units.entry(s)).collect();
                entries.chunks(PIECE).for_each(|piece| put_list(out, piece));
            }
            Call::Leave { subscriber: s } => put_all(out, &[3, subscriber(s)]),
            Call::Begin { subscriber: s, left } => {
                put_all(out, &[4, subscriber(s)]);
                put_bits(out, left);
            }
            Call::Next { subscriber: s } => put_all(out, &[5, subscriber(s)]),
            Call::Advance => put(out, 6),
            Call::GiveBack { subscriber: s, slot } => put_all(out, &[7, subscriber(s), u64::from(*slot)]),
            Call::Lost { unit } => put_all(out, &[8, u64::from(*unit)]),
            Call::Reconcile { residency, as_of } => {
                put_all(out, &[9, *as_of]);
                put_residency(out, residency);
            }
        }
    }

    /// Reads one that may be made of `fly` as it stands.
    pub(super) fn read(at: &mut &[u8], policy: &SweepPolicy) -> Option<Self> {
        let units = policy.unit_map.units() as u64;
        let subscriber = |at: &mut &[u8]| {
            let s = get32(at)?;
            policy.subscribers.get(s as usize).filter(|x| x.on).map(|_| SubscriberId(s))
        };
        Some(match get(at)? {
            0 => Call::Capacity { bytes: get(at)? },
            1 => Call::Adopt { residency: get_residency(at, units)? },
            2 if get(at)? == 0 => Call::Join { plan_units: PlanUnits::all_of(&policy.unit_map) },
            2 => {
                let sizes = (0..units).map(|_| get32(at)).collect::<Option<Vec<_>>>()?;
                let slots: u64 = sizes.iter().map(|&n| u64::from(n)).sum();
                let mut entries = Vec::new();
                while (entries.len() as u64) < slots {
                    let piece = get_list(at)?;
                    if piece.is_empty() || (entries.len() + piece.len()) as u64 > slots {
                        return None;
                    }
                    entries.extend(piece);
                }
                Call::Join { plan_units: PlanUnits::of_sizes(&sizes, entries)? }
            }
            3 => Call::Leave { subscriber: subscriber(at)? },
            4 => {
                let subscriber = subscriber(at)?;
                Call::Begin {
                    subscriber,
                    left: get_bits(at, u64::from(policy.plan_units(subscriber).slots()))?,
                }
            }
            5 => Call::Next { subscriber: subscriber(at)? },
            6 => Call::Advance,
            7 => {
                let (subscriber, slot) = (subscriber(at)?, get32(at)?);
                let out = slot < policy.plan_units(subscriber).slots()
                    && !policy.left_slots(subscriber).get(u64::from(slot));
                out.then_some(Call::GiveBack { subscriber, slot })?
            }
            8 => Call::Lost { unit: get32(at).filter(|&u| u64::from(u) < units)? },
            9 => {
                let as_of = get(at)?;
                Call::Reconcile { residency: get_residency(at, units)?, as_of }
            }
            _ => return None,
        })
    }

    /// Makes the call.
    pub(super) fn make(self, policy: &mut SweepPolicy) -> CallResult {
        let mut came = CallResult::default();
        match self {
            Call::Capacity { bytes } => policy.set_capacity(bytes, &mut came.actions),
            Call::Adopt { residency } => policy.adopt(&residency, &mut came.actions),
            Call::Join { plan_units } => came.subscriber = Some(policy.join(plan_units)),
            Call::Leave { subscriber } => policy.leave(subscriber),
            Call::Begin { subscriber, left } => policy.begin(subscriber, left),
            Call::Next { subscriber } => came.pick = policy.next(subscriber, &mut came.actions),
            Call::Advance => came.moved = policy.advance(&mut came.actions),
            Call::GiveBack { subscriber, slot } => policy.give_back(subscriber, slot),
            Call::Lost { unit } => policy.lost(unit),
            Call::Reconcile { residency, as_of } => policy.reconcile(&residency, as_of),
        }
        came
    }
}

/// What was written and not taken.
#[derive(Debug, Clone)]
pub(super) struct TraceLog {
    out: Vec<u8>,
    calls: Vec<u8>,
    cut: bool,
}

impl TraceLog {
    /// A tape that begins with `out`.
    pub(super) fn new(out: Vec<u8>) -> Self {
        TraceLog { out, calls: Vec::new(), cut: false }
    }

    /// What it holds; afterwards it holds nothing.
    pub(super) fn take(&mut self) -> Vec<u8> {
        self.flush();
        std::mem::take(&mut self.out)
    }

    /// What it holds, and that it ends before its sweep.
    pub(super) fn cut(&mut self) -> Vec<u8> {
        self.flush();
        if !std::mem::replace(&mut self.cut, true) {
            record::append(&mut self.out, CUT, &[]);
        }
        std::mem::take(&mut self.out)
    }

    fn flush(&mut self) {
        if !self.calls.is_empty() {
            record::append(&mut self.out, CALLS, &self.calls);
            self.calls.clear();
        }
    }

    /// Writes a call, unless the tape was cut.
    pub(super) fn tell(&mut self, unit_map: &UnitMap, call: &Call, came: &CallResult) {
        if self.cut {
            return;
        }
        let mut told = Vec::new();
        call.write(unit_map, &mut told);
        came.write(&mut told);
        let long = told.len() > CALL_BYTES_MAX;
        if long || self.out.len() + self.calls.len() + told.len() > TRACE_LOG_BYTES_MAX {
            self.out = self.cut();
            return;
        }
        self.calls.append(&mut told);
        if self.calls.len() >= RECORD_BYTES {
            self.flush();
        }
    }
}
