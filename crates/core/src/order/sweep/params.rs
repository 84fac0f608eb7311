//! The policy's constants, each with what it trades.

/// Shares of window, cache or ring; the defaults were found by simulation (ADR 10).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SweepParams {
    /// Window = at most this part of what is not cached. The one real trade: more is a better
    /// shuffle and more traffic.
    pub window: f64,
    /// ... and where that is fewer units than this, as many, but at most `window_few` of what is not cached: a sweep shuffles badly
    /// through few, and jobs that drift apart lose each other ...
    pub window_units: f64,
    /// See there.
    pub window_few: f64,
    /// At least so many units where all of an order goes through the window, and accordingly fewer where a part of it comes
    /// from the reserve.
    pub window_least: f64,
    /// A window of less than this part of that is none where units are long: it would shuffle too badly to train on, and
    /// share nothing. All of the cache is reserve then, and the rest a plain shuffle.
    pub window_poor: f64,
    /// ... and at most this part of the cache. The rest of the cache is the reserve.
    pub window_of_cache: f64,
    /// For a job that is alone a unit's samples come due no sooner than after this part of a window from its load:
    /// until then it may be on its way, and the job would wait for it instead of reading its reserve. (With others it
    /// would cost them some of what they share.)
    pub lead: f64,
    /// Then they come due over this part of a window after its load, for a job that
    /// keeps up with the sweep ...
    pub spread: f64,
    /// ... and over this part for one that is much slower.
    pub spread_slow: f64,
    /// A starting epoch takes window units younger than this part of a window (all of them if
    /// it is alone).
    pub young: f64,
    /// A job takes a unit at its load if what it already holds will be read within this part
    /// of a window.
    pub backlog: f64,
    /// While the way to the origin is idle, so much of a window may a job hold ahead of need.
    pub early: f64,
    /// A job that would have to jump reads ahead of time until it holds this part of a window.
    pub ahead: f64,
    /// The sweep moves over at most this part of the ring at a time.
    pub jump: f64,
    /// Fewer of a unit's samples than this part are read by range.
    pub range: f64,
    /// So they are if all active jobs together want less than this many units' worth.
    pub wanted: f64,
    /// Beyond the jump a unit is loaded whole only if this part of the active jobs want it.
    pub aside: f64,
    /// A unit just passed changes places with one passed at most this part of the ring earlier.
    pub stir: f64,
    /// A job that has not asked for this many windows of loads is not counted.
    pub active: f64,
    /// Part of the reserve that changes places with window units per turn of the sweep.
    pub rotate: f64,
    /// Where eight jobs or more are active, a unit loaded beyond the jump is taken by those whose backlog is
    /// within this part of a window (`backlog` up to four, in between between).
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

impl SweepParams {
    /// All of them, in the order of the fields (traces carry them so).
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

    /// From values in the order of [`SweepParams::values`].
    pub(super) fn of_values(mut next: impl FnMut() -> Option<f64>) -> Option<Self> {
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
