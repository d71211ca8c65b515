// One HTML file, two pages: the chat and its views, and the API at /docs.
import(location.pathname.endsWith("/docs") ? "./docs.js" : "./app.js");
