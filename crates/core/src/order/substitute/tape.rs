//! The tape of a trace: calls to a sweep and what came of them, as bytes ([`super::trace`]).

use super::{Act, Flywheel, How, Pick, SeatId};
use crate::{
    order::{
        bits::Bits,
        ledger::{get, get_list, get32, put, put_list, take},
        shape::{Laid, Shape},
    },
    record,
    residency::Residency,
};

/// A tape that nobody takes is no longer, in bytes.
pub const TAPE_BYTES_MAX: usize = 64 << 20;
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
    /// [`Flywheel::set_capacity`].
    Capacity {
        /// The new one.
        bytes: u64,
    },
    /// [`Flywheel::adopt`].
    Adopt {
        /// What was here.
        residency: Residency,
    },
    /// [`Flywheel::join`].
    Join {
        /// The job's plan.
        laid: Laid,
    },
    /// [`Flywheel::leave`].
    Leave {
        /// Whose.
        seat: SeatId,
    },
    /// [`Flywheel::begin`].
    Begin {
        /// Whose.
        seat: SeatId,
        /// What is to be handed out.
        left: Bits,
    },
    /// [`Flywheel::next`].
    Next {
        /// Whose.
        seat: SeatId,
    },
    /// [`Flywheel::advance`].
    Advance,
    /// [`Flywheel::give_back`].
    GiveBack {
        /// Whose.
        seat: SeatId,
        /// Which spot.
        spot: u32,
    },
    /// [`Flywheel::lost`].
    Lost {
        /// Which unit.
        unit: u32,
    },
    /// [`Flywheel::reconcile`].
    Reconcile {
        /// What was here.
        residency: Residency,
        /// As of which position of the sweep.
        as_of: u64,
    },
}

/// What came of a call.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Came {
    /// The seat of who joined.
    pub seat: Option<SeatId>,
    /// What was handed out.
    pub pick: Option<Pick>,
    /// Whether the sweep was moved.
    pub moved: bool,
    /// The orders to the store.
    pub acts: Vec<Act>,
}

impl Came {
    pub(super) fn acts(acts: &[Act]) -> Self {
        Came { acts: acts.to_vec(), ..Came::default() }
    }

    fn write(&self, out: &mut Vec<u8>) {
        put(out, self.seat.map_or(0, |s| u64::from(s.0) + 1));
        match self.pick {
            None => out.push(0),
            Some(p) => {
                out.push(match p.how {
                    How::Window => 1,
                    How::Reserve => 2,
                    How::Range => 3,
                });
                put_all(out, &[u64::from(p.spot), u64::from(p.unit), u64::from(p.pass)]);
            }
        }
        out.push(u8::from(self.moved));
        put(out, self.acts.len() as u64);
        for act in &self.acts {
            put(
                out,
                match *act {
                    Act::Evict(u) => u64::from(u) << 1,
                    Act::Load(u) => u64::from(u) << 1 | 1,
                },
            );
        }
    }

    pub(super) fn read(at: &mut &[u8]) -> Option<Self> {
        let seat = match get(at)? {
            0 => None,
            n => Some(SeatId(u32::try_from(n - 1).ok()?)),
        };
        let how = match take(at, 1)?[0] {
            0 => None,
            1 => Some(How::Window),
            2 => Some(How::Reserve),
            3 => Some(How::Range),
            _ => return None,
        };
        let pick = match how {
            None => None,
            Some(how) => Some(Pick { spot: get32(at)?, unit: get32(at)?, how, pass: get32(at)? }),
        };
        let moved = match take(at, 1)?[0] {
            x @ 0..2 => x == 1,
            _ => return None,
        };
        let n = get(at)?;
        // Each takes at least one byte.
        let n = usize::try_from(n).ok().filter(|&n| n <= at.len())?;
        let act = |x: u64| {
            u32::try_from(x >> 1).ok().map(|u| if x & 1 == 1 { Act::Load(u) } else { Act::Evict(u) })
        };
        let acts = (0..n).map(|_| act(get(at)?)).collect::<Option<_>>()?;
        Some(Came { seat, pick, moved, acts })
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
    fn write(&self, shape: &Shape, out: &mut Vec<u8>) {
        let seat = |s: &SeatId| u64::from(s.0);
        match self {
            Call::Capacity { bytes } => put_all(out, &[0, *bytes]),
            Call::Adopt { residency } => {
                put(out, 1);
                put_residency(out, residency);
            }
            Call::Join { laid } if laid.is_all_of(shape) => put_all(out, &[2, 0]),
            Call::Join { laid } => {
                put_all(out, &[2, 1]);
                (0..laid.units()).for_each(|u| put(out, laid.of_unit(u).len() as u64));
                let entries: Vec<u32> = (0..laid.spots()).map(|s| laid.entry(s)).collect();
                entries.chunks(PIECE).for_each(|piece| put_list(out, piece));
            }
            Call::Leave { seat: s } => put_all(out, &[3, seat(s)]),
            Call::Begin { seat: s, left } => {
                put_all(out, &[4, seat(s)]);
                put_bits(out, left);
            }
            Call::Next { seat: s } => put_all(out, &[5, seat(s)]),
            Call::Advance => put(out, 6),
            Call::GiveBack { seat: s, spot } => put_all(out, &[7, seat(s), u64::from(*spot)]),
            Call::Lost { unit } => put_all(out, &[8, u64::from(*unit)]),
            Call::Reconcile { residency, as_of } => {
                put_all(out, &[9, *as_of]);
                put_residency(out, residency);
            }
        }
    }

    /// Reads one that may be made of `fly` as it stands.
    pub(super) fn read(at: &mut &[u8], fly: &Flywheel) -> Option<Self> {
        let units = fly.shape.units() as u64;
        let seat = |at: &mut &[u8]| {
            let s = get32(at)?;
            fly.seats.get(s as usize).filter(|x| x.on).map(|_| SeatId(s))
        };
        Some(match get(at)? {
            0 => Call::Capacity { bytes: get(at)? },
            1 => Call::Adopt { residency: get_residency(at, units)? },
            2 if get(at)? == 0 => Call::Join { laid: Laid::all_of(&fly.shape) },
            2 => {
                let sizes = (0..units).map(|_| get32(at)).collect::<Option<Vec<_>>>()?;
                let spots: u64 = sizes.iter().map(|&n| u64::from(n)).sum();
                let mut entries = Vec::new();
                while (entries.len() as u64) < spots {
                    let piece = get_list(at)?;
                    if piece.is_empty() || (entries.len() + piece.len()) as u64 > spots {
                        return None;
                    }
                    entries.extend(piece);
                }
                Call::Join { laid: Laid::of_sizes(&sizes, entries)? }
            }
            3 => Call::Leave { seat: seat(at)? },
            4 => {
                let seat = seat(at)?;
                Call::Begin { seat, left: get_bits(at, u64::from(fly.laid(seat).spots()))? }
            }
            5 => Call::Next { seat: seat(at)? },
            6 => Call::Advance,
            7 => {
                let (seat, spot) = (seat(at)?, get32(at)?);
                let out = spot < fly.laid(seat).spots() && !fly.left_spots(seat).get(u64::from(spot));
                out.then_some(Call::GiveBack { seat, spot })?
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
    pub(super) fn make(self, fly: &mut Flywheel) -> Came {
        let mut came = Came::default();
        match self {
            Call::Capacity { bytes } => fly.set_capacity(bytes, &mut came.acts),
            Call::Adopt { residency } => fly.adopt(&residency, &mut came.acts),
            Call::Join { laid } => came.seat = Some(fly.join(laid)),
            Call::Leave { seat } => fly.leave(seat),
            Call::Begin { seat, left } => fly.begin(seat, left),
            Call::Next { seat } => came.pick = fly.next(seat, &mut came.acts),
            Call::Advance => came.moved = fly.advance(&mut came.acts),
            Call::GiveBack { seat, spot } => fly.give_back(seat, spot),
            Call::Lost { unit } => fly.lost(unit),
            Call::Reconcile { residency, as_of } => fly.reconcile(&residency, as_of),
        }
        came
    }
}

/// What was written and not taken.
#[derive(Debug, Clone)]
pub(super) struct Tape {
    out: Vec<u8>,
    calls: Vec<u8>,
    cut: bool,
}

impl Tape {
    /// A tape that begins with `out`.
    pub(super) fn new(out: Vec<u8>) -> Self {
        Tape { out, calls: Vec::new(), cut: false }
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
    pub(super) fn tell(&mut self, shape: &Shape, call: &Call, came: &Came) {
        if self.cut {
            return;
        }
        let mut told = Vec::new();
        call.write(shape, &mut told);
        came.write(&mut told);
        let long = told.len() > CALL_BYTES_MAX;
        if long || self.out.len() + self.calls.len() + told.len() > TAPE_BYTES_MAX {
            self.out = self.cut();
            return;
        }
        self.calls.append(&mut told);
        if self.calls.len() >= RECORD_BYTES {
            self.flush();
        }
    }
}
