//! The constants of the sweep's rules, with what each of them trades.

/// The constants of the rules in `docs/SWEEP.md`: parts of the window, the cache or the ring, where not said
/// otherwise. The defaults were found by simulation (ADR 10).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SweepParams {
    /// R1: window size, as a part of what is not cached. A larger window shuffles better and costs more
    /// traffic.
    pub window: f64,
    /// R13: the window is widened to this many units, but not past `window_few`. A sweep shuffles badly
    /// through few units, and jobs that drift apart lose each other.
    pub window_units: f64,
    /// R13: limit of that widening, as a part of what is not cached.
    pub window_few: f64,
    /// R13: minimum window size, in units, for an order that uses the window only. Scaled down by the share
    /// that comes from the reserve.
    pub window_least: f64,
    /// R13: with long units, a window of less than this part of the minimum is no window. It would shuffle
    /// too badly to train on, and share nothing. The whole cache is then reserve, and the rest is a plain
    /// shuffle.
    pub window_poor: f64,
    /// R1: window size at most, as a part of the cache. The rest of the cache is the reserve.
    pub window_of_cache: f64,
    /// R12: for a lone job, samples come due no sooner than this part of a window after their unit's load.
    /// Until then the unit may be on its way, and the job reads its reserve instead of waiting. With several
    /// jobs this delay would cost some of what they share.
    pub lead: f64,
    /// R4: samples come due within this part of a window after the load, for a job that keeps up with the
    /// sweep.
    pub spread: f64,
    /// R4: the same, for a job that is much slower.
    pub spread_slow: f64,
    /// R5: a job that begins an epoch takes the window's units that are younger than this part of a window. A
    /// lone job takes all of them.
    pub young: f64,
    /// R4: a job takes a unit when it is loaded if it will read what it already holds within this part of a
    /// window.
    pub backlog: f64,
    /// R12: a lone job may hold this part of a window ahead of need while the link to the origin is idle.
    pub early: f64,
    /// R6: a job that would have to jump reads taken samples ahead of time until it holds this part of a
    /// window.
    pub ahead: f64,
    /// R6: the sweep moves over at most this part of the ring at a time.
    pub jump: f64,
    /// R7: a job reads a unit by range if it wants less than this part of the unit's samples.
    pub range: f64,
    /// R7: the sweep does not load a unit of which all active jobs together want less than this many units'
    /// worth of samples.
    pub wanted: f64,
    /// R6, R7: for a load aside, active jobs must want this many units' worth for each active job.
    pub aside: f64,
    /// R8: a unit just passed changes places with one passed at most this part of the ring earlier.
    pub stir: f64,
    /// R9: a job is active if it has asked within this many windows of loads.
    pub active: f64,
    /// R10: part of the reserve that rotation replaces in one turn of the sweep.
    pub rotate: f64,
    /// R11: `backlog` for units loaded aside, where eight or more jobs are active. From four to eight active
    /// jobs the limit grows evenly.
    pub aside_backlog: f64,
}

impl Default for SweepParams {
    fn default() -> Self {
        SweepParams {
            window: 0.07,
            window_units: 24.0,
            window_few: 0.1,
            window_least: 6.0,
            window_poor: 0.85,
            window_of_cache: 0.85,
            lead: 0.15,
            spread: 0.5,
            spread_slow: 0.7,
            young: 0.6,
            backlog: 0.6,
            early: 0.85,
            ahead: 0.25,
            jump: 0.005,
            range: 0.4,
            wanted: 0.3,
            aside: 0.25,
            stir: 0.03,
            active: 4.0,
            rotate: 0.1,
            aside_backlog: 0.85,
        }
    }
}

/// The largest value of a constant. Far above what any rule can use, and its product with the number of
/// units still is a number of units.
pub const PARAM_MAX: f64 = 1e6;

impl SweepParams {
    /// Returns all values in the order of the fields, which is also their order in a trace.
    #[must_use]
    pub fn values(&self) -> [f64; 21] {
        [
            self.window,
            self.window_units,
            self.window_few,
            self.window_least,
            self.window_poor,
            self.window_of_cache,
            self.lead,
            self.spread,
            self.spread_slow,
            self.young,
            self.backlog,
            self.early,
            self.ahead,
            self.jump,
            self.range,
            self.wanted,
            self.aside,
            self.stir,
            self.active,
            self.rotate,
            self.aside_backlog,
        ]
    }

    /// Reads values in the order of [`SweepParams::values`]. Returns `None` when a value is missing, or is
    /// not between 0 and [`PARAM_MAX`].
    pub(super) fn of_values(mut value: impl FnMut() -> Option<f64>) -> Option<Self> {
        let mut next = || value().filter(|v| (0.0..=PARAM_MAX).contains(v));
        Some(SweepParams {
            window: next()?,
            window_units: next()?,
            window_few: next()?,
            window_least: next()?,
            window_poor: next()?,
            window_of_cache: next()?,
            lead: next()?,
            spread: next()?,
            spread_slow: next()?,
            young: next()?,
            backlog: next()?,
            early: next()?,
            ahead: next()?,
            jump: next()?,
            range: next()?,
            wanted: next()?,
            aside: next()?,
            stir: next()?,
            active: next()?,
            rotate: next()?,
            aside_backlog: next()?,
        })
    }
}
