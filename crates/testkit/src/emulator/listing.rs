//! Writes a page of a listing as XML, as the manners of the store say.

use super::manners::{Api, Manners, XmlForm, encoded};
use super::objects::{ListedObject, generation};
use super::pages::{Asked, Page};

/// Returns a page as XML.
pub(super) fn write(bucket: &str, manners: &Manners, asked: &Asked, page: &Page) -> String {
    let encode = manners.encoding.applies(asked.encoded);
    let text = |key: &str| if encode { encoded(key) } else { key.to_owned() };
    let mut xml = Xml::new(manners.xml);
    xml.open("ListBucketResult");
    xml.leaf("Name", bucket);
    xml.leaf("Prefix", &text(&asked.prefix));
    if asked.version_2 {
        xml.leaf("KeyCount", &(page.objects.len() + page.prefixes.len()).to_string());
    } else {
        xml.leaf("Marker", &text(asked.marker.as_deref().unwrap_or_default()));
    }
    xml.leaf("MaxKeys", &asked.max_keys.to_string());
    xml.leaf("IsTruncated", if page.truncated { "true" } else { "false" });
    if encode {
        xml.leaf("EncodingType", "url");
    }
    if let Some(token) = &page.token {
        xml.leaf("NextContinuationToken", token);
    }
    if let Some(marker) = &page.next_marker {
        xml.leaf("NextMarker", &text(marker));
    }
    for listed in &page.objects {
        contents(&mut xml, manners, listed, &text(&listed.key));
    }
    for prefix in &page.prefixes {
        xml.open("CommonPrefixes");
        xml.leaf("Prefix", &text(prefix));
        xml.close("CommonPrefixes");
    }
    xml.close("ListBucketResult");
    xml.text
}

fn contents(xml: &mut Xml, manners: &Manners, listed: &ListedObject, key: &str) {
    xml.open("Contents");
    if xml.form == XmlForm::UnknownElements {
        xml.text.push_str("<!-- <Key>not a key</Key> -->");
        xml.open("RestoreStatus");
        xml.leaf("Key", "not/a/key");
        xml.close("RestoreStatus");
        xml.leaf("ChecksumAlgorithm", "CRC64NVME");
        xml.leaf("ChecksumAlgorithm", "SHA256");
    }
    xml.leaf("Key", key);
    if let Some(time) = manners.listed.time.in_listing(listed.modified) {
        xml.leaf("LastModified", &time);
    }
    if let Some(tag) = manners.listed.tag.of(&listed.etag) {
        xml.leaf("ETag", &tag);
    }
    if manners.api == Api::Gcs {
        xml.leaf("Generation", &generation(&listed.etag).to_string());
        xml.leaf("MetaGeneration", "1");
    }
    xml.leaf("Size", &listed.size.to_string());
    xml.leaf("StorageClass", "STANDARD");
    if xml.form == XmlForm::UnknownElements {
        xml.open("Owner");
        xml.leaf("ID", "someone");
        xml.leaf("Size", "7");
        xml.close("Owner");
    }
    xml.close("Contents");
}

/// XML text that grows.
struct Xml {
    text: String,
    form: XmlForm,
    depth: usize,
}

impl Xml {
    fn new(form: XmlForm) -> Self {
        Xml { text: "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n".to_owned(), form, depth: 0 }
    }

    fn open(&mut self, name: &str) {
        self.begin(name);
        self.depth += 1;
    }

    fn close(&mut self, name: &str) {
        self.depth -= 1;
        self.indent();
        self.end(name);
    }

    fn leaf(&mut self, name: &str, text: &str) {
        self.begin(name);
        match self.form {
            XmlForm::Cdata => {
                let parts = text.replace("]]>", "]]]]><![CDATA[>");
                self.text.push_str(&format!("<![CDATA[{parts}]]>"));
            }
            XmlForm::References if name == "Key" => {
                for c in text.chars() {
                    match c.is_ascii_alphanumeric() {
                        true => self.text.push(c),
                        false => self.text.push_str(&format!("&#{};", u32::from(c))),
                    }
                }
            }
            _ => self.text.push_str(&escaped(text)),
        }
        self.end(name);
    }

    fn begin(&mut self, name: &str) {
        self.indent();
        let attributes = match (self.form, self.depth) {
            (XmlForm::Prefixed, 0) => " xmlns:s3=\"http://s3.amazonaws.com/doc/2006-03-01/\"",
            (XmlForm::Attributes, 0) => " xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\" version='2'",
            (XmlForm::Attributes, _) => " kind=\"a &lt;b&gt;\" note='x > y'",
            _ => "",
        };
        self.text.push_str(&format!("<{}{name}{attributes}>", self.prefix()));
    }

    fn end(&mut self, name: &str) {
        self.text.push_str(&format!("</{}{name}>", self.prefix()));
    }

    fn indent(&mut self) {
        if self.form == XmlForm::Pretty {
            self.text.push_str(&format!("\r\n{}", "  ".repeat(self.depth)));
        }
    }

    fn prefix(&self) -> &'static str {
        if self.form == XmlForm::Prefixed { "s3:" } else { "" }
    }
}

/// Returns text as AWS writes it: references for markup and for control characters.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\n' | '\t' => out.push(c),
            c if c.is_control() => out.push_str(&format!("&#x{:x};", u32::from(c))),
            c => out.push(c),
        }
    }
    out
}
