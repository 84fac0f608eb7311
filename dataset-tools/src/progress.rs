//! Progress on stderr: a bar with rate and time left on a terminal, a plain line every few
//! seconds otherwise.

use crate::out::{Out, bytes};
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between two plain lines.
const PLAIN_EVERY: Duration = Duration::from_secs(5);
/// Between two redraws of the bar.
const BAR_EVERY: Duration = Duration::from_millis(200);

/// How progress is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Mode {
    /// A bar on a terminal, plain lines otherwise.
    #[default]
    Auto,
    /// A bar.
    Bar,
    /// Plain lines.
    Plain,
    /// Nothing.
    None,
}

/// What there is to do, as soon as it is known (0 until then).
#[derive(Debug, Default)]
pub struct Total {
    /// Files.
    pub files: AtomicU64,
    /// Bytes.
    pub bytes: AtomicU64,
}

/// What was done: files and bytes.
pub type Done = Arc<dyn Fn() -> (u64, u64) + Send + Sync>;

/// What is done beside, after how long; the flag is set when the display ends.
pub type Late = (Duration, Box<dyn FnOnce(&AtomicBool) + Send>);

/// A display that ends when it is dropped.
pub struct Progress {
    end: Arc<(Mutex<bool>, Condvar)>,
    shown: Option<JoinHandle<()>>,
}

/// One line: what was done, how fast, and how long it will take.
#[must_use]
pub fn line(done: (u64, u64), total: (u64, u64), elapsed: Duration) -> String {
    let seconds = elapsed.as_secs_f64().max(0.001);
    let rate = done.1 as f64 / seconds;
    let mut text = format!(
        "{} files, {} ({}/s, {:.0} files/s)",
        done.0,
        bytes(done.1),
        bytes(rate as u64),
        done.0 as f64 / seconds
    );
    if total.0 > 0 && done.0 > 0 {
        // Files cost by number and by bytes: the larger share that is done is the better guess
        // of neither, so the mean is taken.
        let by_files = done.0 as f64 / total.0 as f64;
        let by_bytes = if total.1 > 0 { done.1 as f64 / total.1 as f64 } else { by_files };
        let share = ((by_files + by_bytes) / 2.0).clamp(0.0001, 1.0);
        let left = Duration::from_secs_f64(seconds * (1.0 - share) / share);
        text += &format!(
            " of {} files, {}: {:.0} %, {} left",
            total.0,
            bytes(total.1),
            share * 100.0,
            indicatif::HumanDuration(left)
        );
    }
    text
}

impl Progress {
    /// Begins to show `done` under `verb`. `late` is called once, on the display's thread,
    /// after `late_after`: where a total is worth counting for a run that takes so long.
    #[must_use]
    pub fn start(
        out: Out,
        mode: Mode,
        verb: &'static str,
        done: Done,
        total: Arc<Total>,
        mut late: Option<Late>,
    ) -> Self {
        let end = Arc::new((Mutex::new(false), Condvar::new()));
        let bar = match mode {
            _ if out.quiet => None,
            Mode::None => None,
            Mode::Bar => Some(true),
            Mode::Plain => Some(false),
            Mode::Auto => Some(std::io::stderr().is_terminal()),
        };
        let Some(bar) = bar else { return Progress { end, shown: None } };
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
                    let stop = lock.lock().unwrap_or_else(PoisonError::into_inner);
                    let stop = cond.wait_timeout_while(stop, every, |stop| !*stop);
                    if *stop.unwrap_or_else(PoisonError::into_inner).0 {
                        break;
                    }
                    if late.as_ref().is_some_and(|(after, _)| began.elapsed() >= *after)
                        && let Some((_, count)) = late.take()
                    {
                        let ended = &ended;
                        scope.spawn(move || count(ended));
                    }
                    let total = (total.files.load(Relaxed), total.bytes.load(Relaxed));
                    let text = line(done(), total, began.elapsed());
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
        *self.end.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.end.1.notify_all();
        if let Some(shown) = self.shown.take() {
            // A panic of the display was printed already and does not concern the result.
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
}
