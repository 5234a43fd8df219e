# Joins the status page and writes it as a C++ constant: cmake -DPAGE=DIR -DOUTPUT=FILE -P embed.cmake
# DIR holds page.html, whose lines @STYLE@ and @SCRIPT@ stand for page.css and the scripts.
file(READ ${PAGE}/page.html html)
file(READ ${PAGE}/page.css style)
set(script "")
foreach(name format.js charts.js panels.js page.js)
  file(READ ${PAGE}/${name} text)
  string(APPEND script "${text}")
endforeach()
string(REPLACE "@STYLE@" "${style}" html "${html}")
string(REPLACE "@SCRIPT@" "${script}" html "${html}")

# By way of a file, since only file(READ) gives bytes.
file(WRITE ${OUTPUT}.html "${html}")
file(READ ${OUTPUT}.html bytes HEX)
file(REMOVE ${OUTPUT}.html)
string(LENGTH "${bytes}" length)
math(EXPR length "${length} / 2")
string(REGEX REPLACE "(................................)" "\\1\n" bytes "${bytes}")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "'\\\\x\\1'," bytes "${bytes}")
file(WRITE ${OUTPUT} "// Made by server/status/embed.cmake.
namespace attn::server {
extern const char kStatusPage[] = {
${bytes}};
extern const unsigned long kStatusPageBytes = ${length};
}  // namespace attn::server
")
