//! The pace of each job, and which jobs count as active (R9).
//!
//! A job's pace is the number of samples that it reads while the sweep loads one mean unit. All limits that
//! `docs/SWEEP.md` gives as parts of a window become numbers of samples here.

use super::SweepPolicy;

impl SweepPolicy {
    /// R9: returns whether a job has asked within the last few windows of loads.
    pub(super) fn is_active(&self, job: usize) -> bool {
        let s = &self.subscribers[job];
        s.joined && (self.position - s.asked_at) as f64 <= self.params.active * self.window_max as f64
    }

    /// R9: returns how many jobs are active.
    pub(super) fn active_jobs(&self) -> usize {
        (0..self.subscribers.len()).filter(|&q| self.is_active(q)).count()
    }

    /// R9: returns whether at most one job is active.
    pub(super) fn one_active_at_most(&self) -> bool {
        // Asked for every sample: of a thousand jobs the second active one answers.
        (0..self.subscribers.len()).filter(|&q| self.is_active(q)).nth(1).is_none()
    }

    /// Returns a job's pace as a part of the sweep's: 1 if it keeps up, 1/4 if it has a quarter of its speed.
    pub(super) fn relative_pace(&self, job: usize) -> f64 {
        (self.subscribers[job].pace / self.mean_unit_samples).min(1.0)
    }

    /// Returns how many samples a job reads while the sweep loads this part of a window.
    pub(super) fn samples_in(&self, part: f64, job: usize) -> f64 {
        part * self.window_max as f64 / self.mean_unit_bytes
            * self.mean_unit_samples
            * self.relative_pace(job).max(0.1)
    }

    /// Notes that a job asks, and measures its pace over half windows.
    pub(super) fn measure_pace(&mut self, job: usize) {
        let (now, half) = (self.position, self.window_max as f64 / 2.0);
        let mean = self.mean_unit_bytes;
        let s = &mut self.subscribers[job];
        s.asked_at = now;
        let passed = (now - s.measured_at.0) as f64;
        if self.window_max == 0 {
            // Without a window nothing is swept, so there is no pace.
            s.measured_at = (now, s.drawn);
        } else if passed >= half {
            // A span of more than two half windows is a pause, not a pace.
            if passed < 2.0 * half + 2.0 * mean {
                let pace = (s.drawn - s.measured_at.1) as f64 / (passed / mean);
                s.pace += (pace - s.pace) * 0.3;
            }
            s.measured_at = (now, s.drawn);
        }
    }
}
