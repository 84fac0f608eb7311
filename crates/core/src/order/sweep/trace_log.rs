//! The trace log: calls to a sweep and their results, as bytes. [`super::trace`] has the rest of the format.

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

/// The longest trace log between two takes, in bytes.
pub const TRACE_LOG_BYTES_MAX: usize = 64 << 20;
/// Calls are written in records of about this many bytes.
const RECORD_BYTES: usize = 64 << 10;
/// A longer call ends the recording.
const CALL_BYTES_MAX: usize = 8 << 20;
/// Entries of a plan in one list.
const LIST_ENTRIES_MAX: usize = 65_536;

pub(super) const CALLS: u8 = 4;
pub(super) const CUT: u8 = 5;

/// A call that changes a sweep.
#[derive(Debug, Clone)]
pub enum Call {
    /// [`SweepPolicy::set_capacity`].
    Capacity {
        /// The new capacity.
        bytes: u64,
    },
    /// [`SweepPolicy::adopt`].
    Adopt {
        /// The units that the cache held.
        residency: Residency,
    },
    /// [`SweepPolicy::join`].
    Join {
        /// The job's plan.
        plan_units: PlanUnits,
    },
    /// [`SweepPolicy::leave`].
    Leave {
        /// The job.
        subscriber: SubscriberId,
    },
    /// [`SweepPolicy::begin`].
    Begin {
        /// The job.
        subscriber: SubscriberId,
        /// The slots to be handed out.
        left: Bits,
    },
    /// [`SweepPolicy::next`].
    Next {
        /// The job.
        subscriber: SubscriberId,
    },
    /// [`SweepPolicy::advance`].
    Advance,
    /// [`SweepPolicy::give_back`].
    GiveBack {
        /// The job.
        subscriber: SubscriberId,
        /// The slot.
        slot: u32,
    },
    /// [`SweepPolicy::lost`].
    Lost {
        /// The unit.
        unit: u32,
    },
    /// [`SweepPolicy::reconcile`].
    Reconcile {
        /// The units that the cache held.
        residency: Residency,
        /// The position of the sweep up to which the units count.
        as_of: u64,
    },
    /// [`SweepPolicy::next_cached`].
    NextCached {
        /// The job.
        subscriber: SubscriberId,
    },
}

/// The result of a call.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CallResult {
    /// The job that joined.
    pub subscriber: Option<SubscriberId>,
    /// The sample that was handed out.
    pub pick: Option<Pick>,
    /// Whether the sweep moved.
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
        // Each action takes at least one byte, which bounds the allocation.
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
                entries.chunks(LIST_ENTRIES_MAX).for_each(|piece| put_list(out, piece));
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
            Call::NextCached { subscriber: s } => put_all(out, &[10, subscriber(s)]),
        }
    }

    /// Reads a call. Returns `None` when it cannot be made on `policy` in its present state.
    pub(super) fn read(at: &mut &[u8], policy: &SweepPolicy) -> Option<Self> {
        let units = policy.unit_map.units() as u64;
        let subscriber = |at: &mut &[u8]| {
            let s = get32(at)?;
            policy.subscribers.get(s as usize).filter(|x| x.joined).map(|_| SubscriberId(s))
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
            10 => Call::NextCached { subscriber: subscriber(at)? },
            _ => return None,
        })
    }

    /// Makes the call on `policy` and returns its result.
    pub(super) fn make(self, policy: &mut SweepPolicy) -> CallResult {
        let mut result = CallResult::default();
        match self {
            Call::Capacity { bytes } => policy.set_capacity(bytes, &mut result.actions),
            Call::Adopt { residency } => policy.adopt(&residency, &mut result.actions),
            Call::Join { plan_units } => result.subscriber = Some(policy.join(plan_units)),
            Call::Leave { subscriber } => policy.leave(subscriber),
            Call::Begin { subscriber, left } => policy.begin(subscriber, left),
            Call::Next { subscriber } => result.pick = policy.next(subscriber, &mut result.actions),
            Call::Advance => result.moved = policy.advance(&mut result.actions),
            Call::GiveBack { subscriber, slot } => policy.give_back(subscriber, slot),
            Call::Lost { unit } => policy.lost(unit),
            Call::Reconcile { residency, as_of } => policy.reconcile(&residency, as_of),
            Call::NextCached { subscriber } => {
                result.pick = policy.next_cached(subscriber, &mut result.actions);
            }
        }
        result
    }
}

/// The recorded bytes that were not taken yet.
#[derive(Debug, Clone)]
pub(super) struct TraceLog {
    out: Vec<u8>,
    calls: Vec<u8>,
    cut: bool,
}

impl TraceLog {
    /// Returns a log that begins with `out`.
    pub(super) fn new(out: Vec<u8>) -> Self {
        TraceLog { out, calls: Vec::new(), cut: false }
    }

    /// Takes the bytes and leaves the log empty.
    pub(super) fn take(&mut self) -> Vec<u8> {
        self.flush();
        std::mem::take(&mut self.out)
    }

    /// Takes the bytes, and marks their end as the end of a cut trace.
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

    /// Appends a call and its result, unless the log was cut.
    pub(super) fn append(&mut self, unit_map: &UnitMap, call: &Call, result: &CallResult) {
        if self.cut {
            return;
        }
        let mut bytes = Vec::new();
        call.write(unit_map, &mut bytes);
        result.write(&mut bytes);
        let long = bytes.len() > CALL_BYTES_MAX;
        if long || self.out.len() + self.calls.len() + bytes.len() > TRACE_LOG_BYTES_MAX {
            self.out = self.cut();
            return;
        }
        self.calls.append(&mut bytes);
        if self.calls.len() >= RECORD_BYTES {
            self.flush();
        }
    }
}
