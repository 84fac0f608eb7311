//! The progress display on stderr: a bar with rate and time left on a terminal, otherwise a line every few
//! seconds.

use crate::out::{Out, bytes, count};
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use parking_lot::{Condvar, Mutex};
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The time between two plain lines.
pub const PLAIN_EVERY: Duration = Duration::from_secs(5);
/// The time between two redraws of the bar.
const BAR_EVERY: Duration = Duration::from_millis(200);

/// The kind of the progress display.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Mode {
    /// A bar on a terminal, plain lines otherwise.
    #[default]
    Auto,
    /// A bar.
    Bar,
    /// A plain line every few seconds.
    Plain,
    /// No progress.
    None,
}

impl Mode {
    /// Whether progress is a bar (true) or plain lines (false); `None` for no progress.
    #[must_use]
    pub fn is_bar(self, out: Out) -> Option<bool> {
        match self {
            _ if out.quiet => None,
            Mode::None => None,
            Mode::Bar => Some(true),
            Mode::Plain => Some(false),
            Mode::Auto => Some(std::io::stderr().is_terminal()),
        }
    }
}

/// All the work of a command; 0 until it is known.
#[derive(Debug, Default)]
pub struct Total {
    /// Files.
    pub files: AtomicU64,
    /// Bytes.
    pub bytes: AtomicU64,
}

impl Total {
    /// Begins to count anew.
    pub fn restart(&self) {
        self.files.store(0, Relaxed);
        self.bytes.store(0, Relaxed);
    }
}

/// Returns the work done so far: files and bytes.
pub type Done = Arc<dyn Fn() -> (u64, u64) + Send + Sync>;

/// Returns what is shown after this time.
pub type Line = Arc<dyn Fn(Duration) -> String + Send + Sync>;

/// Shows work, and how much is left if `total` is known.
#[must_use]
pub fn of_work(done: Done, total: Arc<Total>) -> Line {
    Arc::new(move |elapsed| line(done(), (total.files.load(Relaxed), total.bytes.load(Relaxed)), elapsed))
}

/// Shows a listing: `counted` returns the names so far, and the requests to a store. Nobody knows the rest.
#[must_use]
pub fn of_names(counted: Arc<dyn Fn() -> (u64, Option<u64>) + Send + Sync>) -> Line {
    Arc::new(move |elapsed| {
        let (names, requests) = counted();
        let rate = names as f64 / elapsed.as_secs_f64().max(0.001);
        let text = format!("{} ({rate:.0} names/s)", count(names, "name"));
        match requests {
            Some(requests) => format!("{text}, {}", count(requests, "request")),
            None => text,
        }
    })
}

/// A count that starts after a while, on a thread of its own. Its flag is set when the display ends.
pub type Late = (Duration, Box<dyn FnOnce(&AtomicBool) + Send>);

/// A progress display. It ends when it is dropped.
pub struct Progress {
    end: Arc<(Mutex<bool>, Condvar)>,
    shown: Option<JoinHandle<()>>,
}

/// Formats one line: the work done, the rate, and the time left.
#[must_use]
pub fn line(done: (u64, u64), total: (u64, u64), elapsed: Duration) -> String {
    let seconds = elapsed.as_secs_f64().max(0.001);
    let rate = done.1 as f64 / seconds;
    let mut text = format!(
        "{}, {} ({}/s, {:.0} files/s)",
        count(done.0, "file"),
        bytes(done.1),
        bytes(rate as u64),
        done.0 as f64 / seconds
    );
    if total.0 > 0 && done.0 > 0 {
        // The cost of the rest depends on both the files and the bytes, so the estimate is the mean of both.
        let by_files = done.0 as f64 / total.0 as f64;
        let by_bytes = if total.1 > 0 { done.1 as f64 / total.1 as f64 } else { by_files };
        let share = ((by_files + by_bytes) / 2.0).clamp(0.0001, 1.0);
        let left = Duration::from_secs_f64(seconds * (1.0 - share) / share);
        text += &format!(
            " of {}, {}: {:.0} %, {} left",
            count(total.0, "file"),
            bytes(total.1),
            share * 100.0,
            indicatif::HumanDuration(left)
        );
    }
    text
}

impl Progress {
    /// Starts to show a line after `verb`. Calls `late` once if the display lasts long enough.
    #[must_use]
    pub fn start(out: Out, mode: Mode, verb: &'static str, line: Line, mut late: Option<Late>) -> Self {
        let end = Arc::new((Mutex::new(false), Condvar::new()));
        let Some(bar) = mode.is_bar(out) else { return Progress { end, shown: None } };
        let signal = Arc::clone(&end);
        let shown = std::thread::Builder::new().name("progress".into()).spawn(move || {
            let began = Instant::now();
            let display = bar.then(|| {
                let b = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
                if let Ok(style) = ProgressStyle::with_template("{spinner} {prefix} {wide_msg}") {
                    b.set_style(style);
                }
                b.set_prefix(verb);
                b
            });
            let every = if bar { BAR_EVERY } else { PLAIN_EVERY };
            let ended = AtomicBool::new(false);
            std::thread::scope(|scope| {
                loop {
                    let (lock, cond) = &*signal;
                    let mut stop = lock.lock();
                    cond.wait_while_for(&mut stop, |stop| !*stop, every);
                    if *stop {
                        break;
                    }
                    if late.as_ref().is_some_and(|(after, _)| began.elapsed() >= *after)
                        && let Some((_, count)) = late.take()
                    {
                        let ended = &ended;
                        scope.spawn(move || count(ended));
                    }
                    let text = line(began.elapsed());
                    match &display {
                        Some(b) => {
                            b.set_message(text);
                            b.tick();
                        }
                        None => eprintln!("{verb} {text}"),
                    }
                }
                ended.store(true, Relaxed);
            });
            if let Some(b) = display {
                b.finish_and_clear();
            }
        });
        Progress { end, shown: shown.ok() }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        *self.end.0.lock() = true;
        self.end.1.notify_all();
        if let Some(shown) = self.shown.take() {
            // A panic of the display was printed already and does not change the result.
            let _ended = shown.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_rate_and_time_left() {
        let text = line((50, 500 << 20), (100, 1000 << 20), Duration::from_secs(10));
        assert!(text.contains("50.00 MiB/s") && text.contains("10 seconds left"), "{text}");
        let text = line((50, 500 << 20), (0, 0), Duration::from_secs(10));
        assert!(!text.contains("left"), "{text}");
    }

    #[test]
    fn a_listing_has_no_total() {
        let line = of_names(Arc::new(|| (12_000, Some(13))));
        assert_eq!(line(Duration::from_secs(4)), "12000 names (3000 names/s), 13 requests");
        let line = of_names(Arc::new(|| (1, None)));
        assert_eq!(line(Duration::from_secs(1)), "1 name (1 names/s)");
    }
}
