//! XML as S3 clients parse it.
//!
//! XML 1.0 has no form for control characters and for U+FFFE and U+FFFF. A text with one of them is an error,
//! and never another text.

/// The media type.
pub const TYPE: &str = "application/xml";
/// The namespace of S3's documents.
const NAMESPACE: &str = "http://s3.amazonaws.com/doc/2006-03-01/";

/// A text that XML cannot hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotInXml;

/// A document that is being written.
pub struct Document {
    out: String,
    root: &'static str,
}

impl Document {
    /// Begins a document with this root element, in S3's namespace or in none.
    pub fn new(root: &'static str, has_namespace: bool) -> Self {
        let mut out = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<");
        out.push_str(root);
        if has_namespace {
            out.push_str(&format!(" xmlns=\"{NAMESPACE}\""));
        }
        out.push('>');
        Document { out, root }
    }

    /// Adds an element with a text that needs no escapes.
    pub fn text(&mut self, name: &str, text: &str) {
        self.out.push_str(&format!("<{name}>{text}</{name}>"));
    }

    /// Adds an element with any text.
    ///
    /// # Errors
    /// [`NotInXml`].
    pub fn escaped(&mut self, name: &str, text: &str) -> Result<(), NotInXml> {
        self.open(name);
        for c in text.chars() {
            match escape(c)? {
                Some(escape) => self.out.push_str(escape),
                None => self.out.push(c),
            }
        }
        self.close(name);
        Ok(())
    }

    /// Adds an element with a text for people. A character that XML cannot hold becomes U+FFFD.
    pub fn lossy(&mut self, name: &str, text: &str) {
        let text = text.replace(|c| escape(c).is_err(), "\u{fffd}");
        // Every character was checked.
        let _infallible = self.escaped(name, &text);
    }

    /// Begins an element.
    pub fn open(&mut self, name: &str) {
        self.out.push_str(&format!("<{name}>"));
    }

    /// Ends an element.
    pub fn close(&mut self, name: &str) {
        self.out.push_str(&format!("</{name}>"));
    }

    /// Returns the whole document.
    pub fn end(mut self) -> Vec<u8> {
        self.close(self.root);
        self.out.into_bytes()
    }
}

/// Returns the escape of a character; `None` if it needs none.
fn escape(c: char) -> Result<Option<&'static str>, NotInXml> {
    Ok(Some(match c {
        '&' => "&amp;",
        '<' => "&lt;",
        '>' => "&gt;",
        '"' => "&quot;",
        '\'' => "&apos;",
        // A parser turns line ends into `\n`, and may strip white space at the ends of a text.
        '\t' => "&#9;",
        '\n' => "&#10;",
        '\r' => "&#13;",
        '\0'..='\u{1f}' | '\u{fffe}' | '\u{ffff}' => return Err(NotInXml),
        _ => return Ok(None),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_escaped_or_refused() {
        let mut out = Document::new("R", true);
        out.escaped("K", "a&b<c>\"d'\t\n\r é\u{85}\u{10ffff}").expect("XML holds it");
        for bad in ["\u{1}", "\0", "\u{1f}", "\u{ffff}", "a\u{fffe}b"] {
            assert_eq!(Document::new("R", false).escaped("K", bad), Err(NotInXml), "{bad:?}");
        }
        out.lossy("M", "x\u{1}y");
        let text = String::from_utf8(out.end()).expect("UTF-8");
        let want =
            "<K>a&amp;b&lt;c&gt;&quot;d&apos;&#9;&#10;&#13; é\u{85}\u{10ffff}</K><M>x\u{fffd}y</M></R>";
        assert!(text.ends_with(want), "{text}");
        assert!(text.contains("<R xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">"), "{text}");
    }
}
