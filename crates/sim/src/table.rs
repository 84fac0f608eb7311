//! Outcomes as text and as JSON.

use crate::Outcome;
use std::io::{self, Write};

/// Formats up to four numbers in a line, or else their range.
fn numbers(v: &[f64], digits: usize) -> String {
    if v.len() > 4 {
        let low = v.iter().copied().fold(f64::MAX, f64::min);
        let high = v.iter().copied().fold(f64::MIN, f64::max);
        format!("{low:.digits$}..{high:.digits$}")
    } else {
        v.iter().map(|x| format!("{x:.digits$}")).collect::<Vec<_>>().join(" ")
    }
}

/// The heading of [`line`].
pub const HEADING: &str = "case                          arm     cache  backend  bound   x bound  range  \
                           near              near10            run   fresh  peak  stalled";

/// Formats an outcome as a line of text.
#[must_use]
pub fn line(o: &Outcome) -> String {
    let arm = format!("{:?}", o.arm).to_lowercase();
    format!(
        "{:29} {arm:7} {:4.0}%  {:.3}    {:.3}   {:7.3}  {:.3}  {:16}  {:16}  {:4}  {:.3}  {:4.1}  {}",
        o.case,
        o.cache * 100.0,
        o.ratio,
        o.bound,
        o.times_bound(),
        o.ranged,
        numbers(&o.near, 0),
        numbers(&o.near10, 0),
        o.run_max,
        o.fresh,
        o.peak,
        numbers(&o.stalled, 3),
    )
}

/// Writes an outcome as text, or as one line of JSON.
///
/// # Errors
/// Errors of the writer.
pub fn write(out: &mut dyn Write, o: &Outcome, json: bool) -> io::Result<()> {
    if json {
        let text = serde_json::to_string(o).map_err(io::Error::other)?;
        writeln!(out, "{text}")
    } else {
        writeln!(out, "{}", line(o))
    }
}
