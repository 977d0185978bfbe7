// The map of the documentation is docs/README.md: its sections are those of the sidebar, and what it does not list is not
// published. A section begins with a line in bold or with a heading. Its entries are the first link of each item of its
// lists; a section in bold that has no list has the links of its paragraph.
import fs from 'node:fs'
import path from 'node:path'

export const map = 'docs/README.md'

const link = /\[([^\]]+)\]\(([^)\s]+)\)/g

// links are those of a text, with their names as plain text.
const links = text =>
  [...text.matchAll(link)].map(([, name, href]) => ({ text: name.replace(/\s+/g, ' ').replace(/[`*]/g, ''), href }))

// sections reads the map: [{text, entries: [{text, href}]}].
export function sections(markdown) {
  const found = []
  let section, item, paragraph
  for (const line of markdown.replace(/^ *```[\s\S]*?^ *```/gm, '').split('\n')) {
    const start = line.match(/^\*\*(.+?)\*\*(.*)/) ?? line.match(/^#{2,6} +(.+?)()$/)
    if (start) {
      section = { text: start[1].replace(/[:.]$/, ''), items: [], paragraph: [] }
      found.push(section)
      item = null
      paragraph = section.paragraph
      paragraph.push(start[2])
    } else if (!line.trim()) {
      item = paragraph = null
    } else if (section && /^\s*[-*+] /.test(line)) {
      section.items.push((item = [line]))
    } else {
      ;(item ?? paragraph)?.push(line)
    }
  }
  return found
    .map(({ text, items, paragraph }) => ({
      text,
      entries: items.length ? items.flatMap(lines => links(lines.join('\n')).slice(0, 1)) : links(paragraph.join('\n')),
    }))
    .filter(({ entries }) => entries.length)
}

// files are the paths below root of the files of a directory that end in .md, without what is not documentation.
export function files(root, dir) {
  return fs
    .readdirSync(path.join(root, dir), { recursive: true })
    .map(file => path.posix.join(dir, file.split(path.sep).join('/')))
    .filter(file => file.endsWith('.md') && !/^docs\/(site|gen)\//.test(file))
    .sort()
}

// title is the heading of a page, as plain text. It is undefined if the page has none.
export function title(root, page) {
  const heading = fs.readFileSync(path.join(root, page), 'utf8').match(/^# +(.+)$/m)
  return heading?.[1].replace(link, '$1').replace(/[`*]/g, '')
}

// read gives the map's sections and the pages in them. A README.md in a section is the map of its directory: the pages that
// it links to are below it. Problems say where the map and the files of docs differ, and which pages have no heading. What
// does not exist is left out.
export function read(root) {
  const problems = []
  const pages = new Set([map])
  const target = (source, href) => path.posix.join(path.posix.dirname(source), href.replace(/#.*/, ''))
  const named = page => {
    const text = title(root, page)
    if (!text) problems.push(`${page} has no heading: begin it with "# " and its title`)
    return text ?? page
  }
  const entry = ({ text, href }) => {
    const file = target(map, href)
    if (!fs.existsSync(path.join(root, file))) {
      problems.push(`${map} lists ${href}, which does not exist`)
      return []
    }
    if (file.startsWith('docs/') && file.endsWith('.md')) pages.add(file)
    if (!file.endsWith('/README.md') || !pages.has(file)) return { text, file }
    const dir = path.posix.dirname(file)
    const below = links(fs.readFileSync(path.join(root, file), 'utf8'))
      .map(({ href }) => target(file, href))
      .filter((page, i, all) => path.posix.dirname(page) === dir && page !== file && page.endsWith('.md') && all.indexOf(page) === i)
      .filter(page => fs.existsSync(path.join(root, page)))
    below.forEach(page => pages.add(page))
    return { text, file, below: below.map(page => ({ text: named(page), file: page })) }
  }
  const found = sections(fs.readFileSync(path.join(root, map), 'utf8')).map(({ text, entries }) => ({
    text,
    entries: entries.filter(({ href }) => !/^([a-z]+:|#)/i.test(href)).flatMap(entry),
  }))
  for (const page of files(root, 'docs')) {
    if (!pages.has(page)) problems.push(`${page} is not in ${map}`)
  }
  return { sections: found.filter(({ entries }) => entries.length), pages, problems }
}
