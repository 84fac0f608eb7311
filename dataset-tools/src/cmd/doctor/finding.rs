//! The findings of `fletch doctor`, their order, and the exit code.

use crate::failure::Exit;
use crate::out::count;
use serde::Serialize;
use std::io;

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// It matters only to some users. The exit code stays 0.
    Note,
    /// Fletch works, and is slower or less safe than it could be.
    Warning,
    /// A part of Fletch does not work.
    Error,
}

impl Severity {
    fn word(self) -> &'static str {
        match self {
            Severity::Note => "note",
            Severity::Warning => "warning",
            Severity::Error => "error",
        }
    }
}

/// One finding: what is wrong, and how to mend it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The name of the check.
    pub check: &'static str,
    /// How much it matters.
    pub severity: Severity,
    /// What is wrong, with the value that is wrong.
    pub what: String,
    /// What to do.
    pub fix: String,
}

impl Finding {
    pub fn error(check: &'static str, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Finding { check, severity: Severity::Error, what: what.into(), fix: fix.into() }
    }

    pub fn warning(check: &'static str, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Finding { severity: Severity::Warning, ..Finding::error(check, what, fix) }
    }

    pub fn note(check: &'static str, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Finding { severity: Severity::Note, ..Finding::error(check, what, fix) }
    }

    /// Returns the finding as one line.
    fn line(&self) -> String {
        let text = format!("{}: {}: {}; fix: {}", self.severity.word(), self.check, self.what, self.fix);
        text.replace(['\n', '\r'], " ")
    }
}

/// All that one run checked and found.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// The names of the checks that ran.
    checks: Vec<&'static str>,
    /// The findings, the worst first.
    findings: Vec<Finding>,
}

impl Report {
    /// Adds checks that ran, and their findings.
    pub fn add(&mut self, checks: &[&'static str], findings: Vec<Finding>) {
        self.checks.extend(checks.iter().filter(|c| !self.checks.contains(c)).collect::<Vec<_>>());
        self.findings.extend(findings);
        // Stable: findings of one severity keep the order of the checks.
        self.findings.sort_by_key(|f| std::cmp::Reverse(f.severity));
    }

    /// Returns the exit code: 0 without a warning or an error, 3 with warnings only, 1 with an error.
    #[must_use]
    pub fn exit(&self) -> Exit {
        match self.findings.first().map(|f| f.severity) {
            None | Some(Severity::Note) => Exit::Ok,
            Some(Severity::Warning) => Exit::Partial,
            Some(Severity::Error) => Exit::Failed,
        }
    }

    /// Writes one line a finding, and a line that sums up.
    pub fn write(&self, w: &mut dyn io::Write) -> io::Result<()> {
        self.findings.iter().try_for_each(|f| writeln!(w, "{}", f.line()))?;
        let of = |severity| self.findings.iter().filter(|f| f.severity == severity).count();
        let found: Vec<String> = [(Severity::Error, "error"), (Severity::Warning, "warning")]
            .into_iter()
            .map(|(severity, noun)| (of(severity), noun))
            .filter(|(n, _)| *n > 0)
            .map(|(n, noun)| count(n, noun))
            .collect();
        let sum = if found.is_empty() { "healthy".to_owned() } else { found.join(", ") };
        writeln!(w, "{}: {sum}", count(self.checks.len(), "check"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_finding_comes_first_and_decides_the_exit_code() {
        let mut report = Report::default();
        assert_eq!(report.exit(), Exit::Ok);
        report.add(&["a"], vec![Finding::note("a", "n", "f")]);
        assert_eq!(report.exit(), Exit::Ok);
        report.add(&["b"], vec![Finding::warning("b", "w", "f")]);
        assert_eq!(report.exit(), Exit::Partial);
        report.add(&["b", "c"], vec![Finding::error("c", "two\nlines", "f")]);
        assert_eq!(report.exit(), Exit::Failed);
        let mut text = Vec::new();
        report.write(&mut text).expect("written");
        let text = String::from_utf8(text).expect("text");
        assert_eq!(
            text,
            "error: c: two lines; fix: f\nwarning: b: w; fix: f\nnote: a: n; fix: f\n\
             3 checks: 1 error, 1 warning\n"
        );
    }
}
